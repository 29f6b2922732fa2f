"""`lm_eval --model kvxfer`, literally, on the embedded pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import lm_eval
import pytest

from kvbench.embedded import member_path
from kvbench.errors import BadInputError
from kvbench.paths import tasks_directory
from kvbench.scoring.arms import mapper_arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.evaluate import evaluate_arms, task_manager
from kvbench.scoring.lm import KVTransferLM
from kvbench.scoring.scorer import SharedScorer

TASKS = ["tiny_choice", "tiny_fewshot", "tiny_sums", "tiny_prefix", "tiny_turns"]
LIMIT = 24
PAIR = {"pretrained": "embedded:target", "source": "embedded:source"}
CHANCE = 0.25


@pytest.fixture(scope="module")
def manager() -> Any:
    return task_manager(TASKS)


def _run(lm: Any, manager: Any, limit: int | None = LIMIT) -> dict[str, Any]:
    result: dict[str, Any] = lm_eval.simple_evaluate(model=lm, tasks=TASKS, task_manager=manager, limit=limit, bootstrap_iters=0)
    return result


@pytest.fixture(scope="module")
def plain(manager: Any) -> dict[str, Any]:
    """Plain `lm_eval --model hf` on the target."""
    from lm_eval.models.huggingface import HFLM

    return _run(HFLM(pretrained=str(member_path("target")), dtype="float32", device="cpu", batch_size=16), manager)


@pytest.fixture(scope="module")
def plain_source(manager: Any) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    return _run(HFLM(pretrained=str(member_path("source")), dtype="float32", device="cpu", batch_size=16), manager)


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["samples"].keys() == wanted["samples"].keys()
    for task, rows in wanted["samples"].items():
        assert len(found["samples"][task]) == len(rows) == LIMIT
        for a, b in zip(found["samples"][task], rows, strict=True):
            assert (a["doc_id"], a["filter"], a["doc_hash"], a["prompt_hash"]) == (b["doc_id"], b["filter"], b["doc_hash"], b["prompt_hash"])
            for x, y in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                if isinstance(y, str):
                    assert x == y
                else:
                    assert float(x[0]) == pytest.approx(float(y[0]), abs=1e-3)
                    assert x[1] == y[1]
            for metric in b["metrics"]:
                if metric != "token_perplexity":
                    assert a[metric] == b[metric]


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("arguments", [{"arm": "target"}, {"mapper": "oracle"}], ids=["target", "oracle"])
def test_target_and_oracle_equal_plain_hf_on_the_target(manager, plain, batch_size, arguments):
    _assert_same(_run(KVTransferLM(**PAIR, **arguments, batch_size=batch_size, device="cpu"), manager), plain)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_source_arm_equals_plain_hf_on_the_source(manager, plain_source, batch_size):
    _assert_same(_run(KVTransferLM(**PAIR, arm="source", batch_size=batch_size, device="cpu"), manager), plain_source)


def test_identity_on_a_self_pair_equals_the_model(manager, plain):
    lm = KVTransferLM(pretrained="embedded:target", source="embedded:target", mapper="identity", batch_size=16, device="cpu")
    _assert_same(_run(lm, manager), plain)


def test_arms_in_one_pass_equal_arms_one_by_one(manager):
    source = KVTransferLM(**PAIR, mapper="embedded:ridge", batch_size=8, device="cpu").scorer.engine
    models = (source.models["source"], source.models["target"])
    arms = [own_prefill("target", models[1]), own_prefill("source", models[0]), mapper_arm("embedded:ridge", *models), mapper_arm("zero", *models)]
    scorer = SharedScorer(TransferEngine(*models, arms), batch_size=8, max_length=1024)
    together = evaluate_arms(scorer, TASKS, manager=manager, limit=LIMIT)
    for arm, arguments in (("embedded-ridge", {"mapper": "embedded:ridge"}), ("zero", {"mapper": "zero"})):
        _assert_same(together[arm], _run(KVTransferLM(**PAIR, **arguments, batch_size=16, device="cpu"), manager))


def test_every_arm_means_what_it_should(manager):
    """On all items: target clearly above source, both above chance, ridge near the target, zero near chance."""
    lm = KVTransferLM(**PAIR, mapper="embedded:ridge", batch_size=16, device="cpu")
    models = (lm.scorer.engine.models["source"], lm.scorer.engine.models["target"])
    arms = [own_prefill("target", models[1]), own_prefill("source", models[0]), mapper_arm("embedded:ridge", *models), mapper_arm("zero", *models)]
    results = evaluate_arms(SharedScorer(TransferEngine(*models, arms), batch_size=32, max_length=1024), TASKS, manager=manager)
    for task in ("tiny_choice", "tiny_fewshot", "tiny_turns"):
        target, source, ridge, zero = (results[a]["results"][task]["acc,none"] for a in ("target", "source", "embedded-ridge", "zero"))
        assert target > 0.95
        assert CHANCE + 0.2 < source < target - 0.2
        assert ridge > 0.9
        assert abs(zero - CHANCE) < 0.1
    perplexity = {a: results[a]["results"]["tiny_prefix"]["token_perplexity,none"] for a in results}
    assert perplexity["target"] < perplexity["embedded-ridge"] < perplexity["source"] < perplexity["zero"]


def test_chat_template_fewshot_and_generation_arguments(manager, plain):
    from lm_eval.models.huggingface import HFLM

    settings = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 2, "gen_kwargs": "temperature=0,max_gen_toks=6"}
    kwargs = {"tasks": ["tiny_fewshot", "tiny_sums"], "task_manager": manager, "limit": 8, "bootstrap_iters": 0}
    wanted = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(member_path("target")), dtype="float32", device="cpu", batch_size=4), **kwargs, **settings
    )
    found = lm_eval.simple_evaluate(model=KVTransferLM(**PAIR, arm="target", batch_size=4, device="cpu"), **kwargs, **settings)
    for task in kwargs["tasks"]:
        for a, b in zip(found["samples"][task], wanted["samples"][task], strict=True):
            assert a["prompt_hash"] == b["prompt_hash"]
            assert [r if isinstance(r, str) else r[1] for r in a["filtered_resps"]] == [
                r if isinstance(r, str) else r[1] for r in b["filtered_resps"]
            ]


ROLLING = """
task: tiny_rolling
custom_dataset: !function rolling.documents
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
metadata:
  version: 1.0
"""
ROLLING_DATA = """
from datasets import Dataset
from kvbench.embedded.corpus import calibration_texts


def documents(**kwargs):
    return {"test": Dataset.from_list([{"text": t} for t in calibration_texts(documents=3)])}
"""


@pytest.fixture
def rolling(tmp_path: Path) -> Any:
    (tmp_path / "rolling.yaml").write_text(ROLLING)
    (tmp_path / "rolling.py").write_text(ROLLING_DATA)
    return task_manager(["tiny_rolling"], [tmp_path])


def test_rolling_perplexity_runs_for_target_and_names_the_task_to_use_for_transfer(rolling):
    from lm_eval.models.huggingface import HFLM

    kwargs = {"tasks": ["tiny_rolling"], "task_manager": rolling, "bootstrap_iters": 0}
    wanted = lm_eval.simple_evaluate(model=HFLM(pretrained=str(member_path("target")), dtype="float32", device="cpu"), **kwargs)
    found = lm_eval.simple_evaluate(model=KVTransferLM(**PAIR, arm="target", device="cpu"), **kwargs)
    key = ("results", "tiny_rolling", "word_perplexity,none")
    assert found[key[0]][key[1]][key[2]] == pytest.approx(wanted[key[0]][key[1]][key[2]], rel=1e-3)
    with pytest.raises(BadInputError, match=r"tiny_rolling.*wikitext2_prefix"):
        lm_eval.simple_evaluate(model=KVTransferLM(**PAIR, mapper="zero", device="cpu"), **kwargs)


def test_response_cache_across_arms_is_refused(manager, tmp_path):
    kwargs = {"tasks": ["tiny_choice"], "task_manager": manager, "limit": 4, "bootstrap_iters": 0, "use_cache": str(tmp_path / "cache")}
    first = lm_eval.simple_evaluate(model=KVTransferLM(**PAIR, mapper="zero", device="cpu"), **kwargs)
    again = lm_eval.simple_evaluate(model=KVTransferLM(**PAIR, mapper="zero", device="cpu"), **kwargs)
    assert first["results"] == again["results"]
    with pytest.raises(BadInputError, match="answers of another arm"):
        lm_eval.simple_evaluate(model=KVTransferLM(**PAIR, mapper="raw", device="cpu"), **kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no target"),
        ({"pretrained": "embedded:target"}, "needs source="),
        ({"pretrained": "embedded:target", "source": "embedded:source"}, "needs mapper="),
        ({**PAIR, "arm": "both", "mapper": "zero"}, "arm=both is unknown"),
        ({**PAIR, "arm": "source", "mapper": "zero"}, "uses no mapper"),
        ({**PAIR, "mapper": "ziro"}, "neither a control"),
        ({**PAIR, "mapper": "embedded:mlpp"}, "no embedded mapper"),
        ({**PAIR, "mapper": "zero", "hold_back": "0"}, "hold_back = 0"),
        ({**PAIR, "mapper": "zero", "hold_back": "one"}, "not a whole number"),
        ({**PAIR, "mapper": "zero", "gates": "perhaps"}, "neither true nor false"),
        ({**PAIR, "mapper": "zero", "peft": "x"}, "peft=x is not supported"),
        ({**PAIR, "target": "embedded:stranger", "mapper": "zero"}, "name two models"),
        ({"pretrained": "embedded:targe", "source": "embedded:source", "mapper": "zero"}, "embedded"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, message):
    with pytest.raises(BadInputError, match=message):
        KVTransferLM(**arguments, device="cpu")


@pytest.fixture(scope="module")
def lm_eval_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    try:
        distribution("kvbench")
    except PackageNotFoundError:
        pytest.skip("kvbench is not installed here, so lm_eval cannot find it; tox installs the wheel")
    program = Path(sys.executable).with_name("lm_eval")
    assert program.exists()

    def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run([str(program), *arguments], capture_output=True, text=True, cwd=cwd, env=environment, timeout=600, check=False)

    return run


@pytest.mark.parametrize("arm", ["mapper=embedded:ridge", "arm=target", "arm=source", "mapper=zero"])
def test_the_literal_command(lm_eval_command, tmp_path, arm):
    done = lm_eval_command(
        *("--model", "kvxfer", "--model_args", f"pretrained=embedded:target,source=embedded:source,{arm}"),
        *("--tasks", "tiny_choice,tiny_sums", "--include_path", str(tasks_directory()), "--limit", "8", "--batch_size", "auto"),
        *("--log_samples", "--output_path", str(tmp_path / "out")),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_choice" in done.stdout
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert results["config"]["kvxfer"]["contexts"] == 16
    assert len(list((tmp_path / "out").rglob("samples_*.jsonl"))) == 2


def test_the_command_ends_without_a_traceback(lm_eval_command, tmp_path):
    done = lm_eval_command(
        *("--model", "kvxfer", "--model_args", "pretrained=embedded:target,source=embedded:source,mapper=nowhere"),
        *("--tasks", "tiny_choice", "--include_path", str(tasks_directory())),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "mapper 'nowhere' is neither a control" in done.stderr
