"""wikitext2_prefix, coqa_handoff and the stock tasks of the suite from local rows, with the network denied."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvbench.errors import BadInputError
from kvbench.pairs.tokenizers import tokenizer_fingerprint
from kvbench.paths import tasks_directory
from kvbench.runs import rows_from_lm_eval
from kvbench.scoring.carried import carried_tokens
from kvbench.scoring.offline import overlays

ROWS: dict[str, list[dict[str, Any]]] = {
    "arc_easy/test": [{"question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"}],
    "hellaswag/test": [{"activity_label": "Run", "ctx_a": "A man", "ctx_b": "he", "endings": ["runs.", "sits.", "eats.", "sings."], "label": "2"}],
    "winogrande/test": [{"sentence": "Ann thanked Bo because _ helped.", "option1": "Ann", "option2": "Bo", "answer": "2"}],
    "piqa/test": [{"goal": "To eat", "sol1": "chew", "sol2": "sing", "label": 0}],
    "boolq/test": [{"passage": "Snow is white.", "question": "is snow white", "label": 1}],
    "mmlu/astronomy/dev": [{"question": f"Star {i}?", "choices": ["a", "b", "c", "d"], "answer": 1} for i in range(5)],
    "mmlu/astronomy/test": [{"question": "Sun?", "choices": ["a", "b", "c", "d"], "answer": 2}],
    "gsm8k/test": [{"question": "1 + 1?", "answer": "#### 2"}],
    "coqa/test": [
        {
            "id": "c1",
            "story": "Ann has a red cat.",
            "questions": {"input_text": ["Who has a cat?", "What colour?"], "turn_id": [1, 2]},
            "answers": {"input_text": ["Ann.", "Red."], "turn_id": [1, 2]},
        }
    ],
}
NAMES = ["arc_easy", "hellaswag", "winogrande", "piqa", "boolq", "mmlu_available", "gsm8k_cot", "wikitext2_prefix", "coqa_handoff"]
MODEL = "embedded:target"
P = 12


@pytest.fixture(scope="module")
def chunks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chunks_of_wikitext2_prefix", tasks_directory() / "prefix" / "chunks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """Text that the embedded models know, in pages."""
    from kvbench.embedded.corpus import calibration_texts

    return [f"{text}\n" for text in calibration_texts(documents=4)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, pages: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in {**ROWS, "wikitext2/test": [{"page": page} for page in pages]}.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection and any look-up of a host fails the test."""

    def refuse(*arguments: object, **_more: object) -> None:
        raise AssertionError(f"the network was used: {arguments[1:]}")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _load(names: list[str], data: Path, out: Path, **metadata: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    overlays(names, data, out)
    settings = {"pretrained": MODEL, "prefix_tokens": P, **metadata}
    tasks: dict[str, Any] = TaskManager(include_path=[str(out)], include_defaults=False, metadata=settings).load(names)["tasks"]
    return tasks


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_every_task_builds_its_requests_without_a_network(data, tmp_path, denied):
    with pytest.raises(AssertionError, match="the network was used"):
        socket.create_connection(("huggingface.co", 443))
    tasks = _load(NAMES, data, tmp_path / "out")
    assert set(tasks) == {*NAMES, "mmlu_astronomy"} - {"mmlu_available"}
    for task in tasks.values():
        task.build_all_requests(rank=0, world_size=1)
    contexts = {name: str(task.instances[0].args[0]) for name, task in tasks.items()}
    assert contexts["arc_easy"] == "Question: Which?\nAnswer:"
    assert contexts["hellaswag"] == "Run: A man He"
    assert [request.args for request in tasks["winogrande"].instances] == [
        ("Ann thanked Bo because Ann", " helped."),
        ("Ann thanked Bo because Bo", " helped."),
    ]
    assert contexts["mmlu_astronomy"].count("Star ") == 5
    assert contexts["gsm8k_cot"].count("The answer is") == 8


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_real_rows_build_without_a_network(shared_data, tmp_path, denied):
    tasks = _load(["arc_challenge", "boolq", "mmlu_available", "gsm8k_cot", "coqa_handoff"], shared_data, tmp_path / "out")
    counts = {name: len(task.eval_docs) for name, task in tasks.items() if not name.startswith("mmlu")}
    # The counts that the README of the data gives; CoQA's is the sum of the turns of its 24 conversations.
    rows = [json.loads(line) for line in (shared_data / "coqa" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert counts == {"arc_challenge": 300, "boolq": 100, "gsm8k_cot": 100, "coqa_handoff": sum(len(row["questions"]["input_text"]) for row in rows)}
    assert [len(task.eval_docs) for name, task in tasks.items() if name.startswith("mmlu")] == [40] * 8


def test_coqa_has_one_item_per_turn_with_the_true_answers_so_far(data, tmp_path):
    task = _load(["coqa_handoff"], data, tmp_path / "out")["coqa_handoff"]
    docs = list(task.eval_docs)
    assert [(doc["conversation"], doc["turn"], doc["answers"]) for doc in docs] == [("c1", 1, ["Ann."]), ("c1", 2, ["Red."])]
    assert docs[0]["context"] == "Ann has a red cat.\n\nQ: Who has a cat?\n\nA:"
    assert docs[1]["context"] == "Ann has a red cat.\n\nQ: Who has a cat?\n\nA: Ann.\n\nQ: What colour?\n\nA:"
    assert task.config.generation_kwargs["until"] == ["\n"]
    assert task.process_results(docs[1], [" the red!"]) == {"f1": 1.0, "exact_match": 1.0}
    # "red cat" against "red": precision 1/2, recall 1.
    assert task.process_results(docs[1], ["red cat\nQ:"]) == {"f1": pytest.approx(2 / 3), "exact_match": 0.0}


def test_coqa_keeps_further_annotators_answers_once(data, tmp_path):
    task = _load(["coqa_handoff"], data, tmp_path / "out")["coqa_handoff"]
    row = ROWS["coqa/test"][0] | {
        "additional_answers": {"0": {"input_text": ["ann.", "Crimson"]}, "1": {"input_text": ["Ann M.", "red."]}, "2": None}
    }
    assert [doc["answers"] for doc in task.config.process_docs([row])] == [["Ann.", "Ann M."], ["Red.", "Crimson"]]


def test_chunks_are_cut_from_the_tokens_of_the_whole_text(chunks, tokenizer, pages):
    """Against the protocol written out: join, tokenise, cut."""
    rows = chunks.chunks(pages, tokenizer, P)
    ids = tokenizer("".join(pages), add_special_tokens=False)["input_ids"]
    assert len(rows) == len(ids) // (2 * P) > 1
    assert [row["context_ids"] + row["continuation_ids"] for row in rows] == [ids[2 * P * i : 2 * P * (i + 1)] for i in range(len(rows))]
    assert {len(row["context_ids"]) for row in rows} == {row["tokens"] for row in rows} == {P}
    whole = "".join(row["context"] + row["continuation"] for row in rows)
    assert "".join(pages).startswith(whole)
    assert rows[0]["article"] == 0
    assert rows[-1]["article"] == sum(len(whole) - len(rows[-1]["continuation"]) >= sum(map(len, pages[: i + 1])) for i in range(len(pages)))


def _bytes_tokenizer() -> Any:
    """One token per byte, so that a cut can fall into a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("text", "faithful"),
    [("abcdefgh", [True]), ("abc\u00e9efg", [False]), ("abc efgh", [False]), ("abcdefghabc\u00e9efg", [True, False])],
    ids=["plain", "cut in a character", "cut behind a blank", "second chunk"],
)
def test_text_that_does_not_tokenise_back_is_marked_and_its_tokens_are_kept(chunks, text, faithful):
    tokenizer = _bytes_tokenizer()
    rows = chunks.chunks([text], tokenizer, 4)
    assert [row["retokenises"] for row in rows] == faithful
    assert [token for row in rows for token in row["context_ids"] + row["continuation_ids"]] == tokenizer(text)["input_ids"][: 8 * len(rows)]
    assert "\ufffd" not in "".join(row["context"] + row["continuation"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no model is named"),
        ({"pretrained": MODEL, "prefix_tokens": "many"}, "prefix_tokens=many is not a whole number of at least 2"),
        ({"pretrained": MODEL, "prefix_tokens": 1}, "prefix_tokens=1 is not"),
        ({"pretrained": MODEL, "prefix_tokens": 12.5}, "prefix_tokens=12.5 is not"),
        (
            {"pretrained": MODEL, "prefix_tokens": 1024, "max_length": 1024},
            "needs 2048 positions, but max_length=1024; give prefix_tokens=512 or less",
        ),
        ({"pretrained": MODEL, "prefix_tokens": 100_000}, "fewer than one chunk of 2 x 100000"),
        ({"pretrained": "embedded:targe"}, "embedded"),
    ],
)
def test_bad_settings_say_what_to_do(chunks, data, settings, message):
    with pytest.raises(BadInputError, match=message):
        chunks.wikitext2(data_files={"test": str(data / "wikitext2" / "test.jsonl")}, **settings)


def test_text_that_cannot_be_read_is_one_clear_error(chunks, tmp_path):
    with pytest.raises(BadInputError, match=r"cannot read the text of wikitext2_prefix from .*nothing.jsonl"):
        chunks.wikitext2(data_files={"test": str(tmp_path / "nothing.jsonl")}, pretrained=MODEL)


def test_carried_tokens_are_taken_or_refused(chunks, tokenizer, pages):
    doc = chunks.chunks(pages, tokenizer, P)[0]

    def take(context: object = None, fingerprint: str = tokenizer_fingerprint(tokenizer), max_length: int = 1024, document: object = doc) -> Any:
        return carried_tokens(document, doc["context"] if context is None else context, fingerprint=lambda: fingerprint, max_length=max_length)

    assert take() == (doc["context_ids"], doc["continuation_ids"])
    assert take(document={"context": "a"}) is None
    assert take(document="text") is None
    assert take(max_length=2 * P - 1) == take()
    with pytest.raises(BadInputError, match="a chat template"):
        take(context="User: " + doc["context"])
    with pytest.raises(BadInputError, match="cut with another tokenizer"):
        take(fingerprint="0" * 64)
    with pytest.raises(BadInputError, match=f"has {2 * P} tokens, but the model takes {2 * P - 2}"):
        take(max_length=2 * P - 2)


@pytest.fixture(scope="module")
def lm() -> Any:
    from kvbench.scoring.lm import KVTransferLM

    return KVTransferLM(pretrained=MODEL, arm="target", device="cpu", batch_size=4, dtype="float32")


def test_prefix_perplexity_is_the_models_own_over_the_scored_half(lm, data, tmp_path):
    """Against one plain forward pass per chunk."""
    import torch

    task = _load(["wikitext2_prefix"], data, tmp_path / "out")["wikitext2_prefix"]
    docs = list(task.eval_docs)
    task.build_all_requests(rank=0, world_size=1)
    fingerprint = tokenizer_fingerprint(lm.tokenizer)
    requests = [
        (request.args, *(carried_tokens(request.doc, request.args[0], fingerprint=lambda: fingerprint, max_length=lm.max_length) or ((), ())))
        for request in task.instances
    ]
    scores = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    wanted = []
    for doc in docs:
        ids = torch.tensor([doc["context_ids"] + doc["continuation_ids"]])
        with torch.no_grad():
            logprobs = lm.model(ids).logits[0].float().log_softmax(-1)
        wanted.append(-logprobs[P - 1 : -1].gather(1, ids[0, P:, None]).mean().item())
    assert [-nats / P for nats, _ in scores] == pytest.approx(wanted, abs=1e-4)
    items = [task.process_results(doc, [score])["token_perplexity"] for doc, score in zip(docs, scores, strict=True)]
    assert task.aggregation()["token_perplexity"](items) == pytest.approx(math.exp(sum(wanted) / len(wanted)), rel=1e-4)


def test_runs_understand_both_tasks(lm, data, tmp_path, capsys):
    """One row per chunk with its size, one per turn with its conversation."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = ["wikitext2_prefix", "coqa_handoff"]
    overlays(names, data, tmp_path / "out")
    manager = TaskManager(include_path=[str(tmp_path / "out")], include_defaults=False, metadata={"pretrained": MODEL, "prefix_tokens": P})
    results: Any = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, limit=2, bootstrap_iters=0)
    rows: Callable[[str], Any] = lambda task: rows_from_lm_eval(  # noqa: E731
        results["samples"][task], task, "target", higher_is_better=results["higher_is_better"][task]
    )
    chunk = rows("wikitext2_prefix")[0]
    assert chunk.sizes == {"token_perplexity": P}
    assert chunk.higher_is_better == {"token_perplexity": False}
    assert chunk.groups == {"article": "0"}
    mean = sum(row.metrics["token_perplexity"] for row in rows("wikitext2_prefix")) / (2 * P)
    assert results["results"]["wikitext2_prefix"]["token_perplexity,none"] == pytest.approx(math.exp(mean))
    turn = rows("coqa_handoff")[1]
    assert turn.groups == {"conversation": "c1", "turn": "2"}
    assert turn.gold == "Red."
    assert set(turn.metrics) == {"f1", "exact_match"}
