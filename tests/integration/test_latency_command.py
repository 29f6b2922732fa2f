"""`kvbench latency` and `kvbench plan` as a user runs them."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from kvbench.cli import latency, plan
from kvbench.errors import KVBenchError
from kvbench.runs.latency import Latency
from kvbench.runs.measured import read_extras

PAIR = ("embedded:source", "embedded:target")
SHORT = ("--lengths", "16,64,160", "--warmups", 1, "--repeats", 3, "--no-gates")


def test_everything_in_one_call(run_cli, tmp_path):
    out = tmp_path / "run"
    command = ["latency", *PAIR, "--mapper", "ridge=embedded:ridge", "--mapper", "head_local=embedded:head_local", "--mapper", "raw", *SHORT]
    command += [
        "--batch-sizes",
        "1,2",
        "--quality",
        "embedded:world",
        "--quality-sequences",
        4,
        "--quality-hold-backs",
        "1,16",
        "--memory",
        "--out",
        out,
    ]
    done = run_cli(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(str(out / "latency.json"))
    assert "memory plan: weights" in done.stderr
    found = read_extras(out).latency
    assert found is not None
    assert found.arms() == ("ridge", "head_local", "raw")
    assert found.lengths() == (16, 64, 160)
    assert found.batches() == (1, 2)
    for arm in found.arms():
        for tokens in found.lengths():
            assert found.speedup(arm, tokens, cold=False) is not None
            assert found.point(arm, tokens, cold=True).p50_seconds > found.point(arm, tokens).p50_seconds
    assert found.phase("page artifact", 0, arm="ridge") is not None
    # Ridge was fitted for this pair: nearer to the target than the raw cache at every hold_back.
    kl = {(p.arm, p.hold_back): p.kl_nats for p in found.quality}
    assert kl["ridge", 1] < kl["raw", 1]
    assert kl["ridge", 16] < kl["raw", 16]
    assert {s.stage for s in found.memory} == {"calibrate", "fit", "apply, ridge", "apply, head_local", "apply, raw", "evaluate"}
    # The target's cache alone, 160 tokens in float32, is in the peak of applying.
    apply = next(s for s in found.memory if s.stage == "apply, ridge")
    assert apply.peak_bytes > 160 * 2 * 6 * 2 * 32 * 4
    # The tables say the same, and every row says where it was measured.
    table = pd.read_csv(out / "latency" / "first_token.csv")
    assert len(table) == len(found.points)
    assert set(table["attention"]) == {"sdpa"}
    assert set(table["dtype"]) == {"float32"}
    for name in ("latency", "speedup", "latency_parts", "quality_latency"):
        assert (out / "latency" / f"{name}.png").stat().st_size > 5000
    for words in (
        "time to the first token",
        "speed-up warm",
        "speed-up cold",
        "quality against cost",
        "peak memory",
        "attention sdpa",
        "is faster than re-prefill",
    ):
        assert words in done.stdout
    again = run_cli(*command)
    assert again.returncode == 2
    assert "holds a latency measurement already" in again.stderr


def test_json_and_the_default_lengths(run_cli, tmp_path):
    done = run_cli(
        "latency", *PAIR, "--mapper", "zero", "--warmups", 0, "--repeats", 1, "--no-gates", "--no-head", "--json", "--out", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    found = Latency.model_validate(json.loads(done.stdout))
    # The embedded family has 1,024 positions.
    assert found.lengths() == (64, 128, 256, 512, 1024)
    assert "lengths 2,048 and up are left out" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "64,32"), "--lengths '64,32': the numbers must be positive and increasing"),
        (("--lengths", "0,32"), "--lengths '0,32'"),
        (("--lengths", "-5"), "--lengths '-5'"),
        (("--lengths", "a"), "give whole numbers separated by commas"),
        (("--lengths", "64,2048"), "2,048 is beyond the 1,024 positions of 'embedded:source'"),
        (("--batch-sizes", "2,1"), "--batch-sizes '2,1'"),
        (("--hold-back", "0"), "hold_back = 0"),
        (("--repeats", "0"), "repeats = 0"),
        (("--threads", "0"), "--threads 0"),
        (("--baseline", "tensorrt"), "unknown baseline 'tensorrt'; use transformers or vllm"),
        (("--baseline", "vllm"), "vllm is not installed"),
        (("--baseline-url", "http://127.0.0.1:9", "--baseline-model", "x"), "cannot be asked"),
        (("--baseline-url", "http://127.0.0.1:9"), "belong together"),
        (("--baseline-prompt", "audio"), "use tokens or text"),
        (("--mapper", "nowhere"), "mapper 'nowhere' is neither a control"),
        (("--mapper", "ridge=zero"), "two mappers would be called 'ridge'"),
        (("--quality-run", "runs/x"), "give its held-out text with --quality"),
        (("--quality", "embedded:world", "--quality-hold-backs", "16,1"), "--quality-hold-backs '16,1'"),
    ],
)
def test_mistakes_are_told_before_models_are_loaded(tmp_path, arguments, message):
    out = tmp_path / "run"
    error = _refusal(latency.latency, [*PAIR, "--mapper", "ridge=embedded:ridge", "--lengths", "16,32", *arguments, "--out", out])
    assert message in str(error)
    assert not out.exists()


def test_a_mapper_of_another_pair(run_cli, tmp_path):
    done = run_cli("latency", "embedded:target", "embedded:source", "--mapper", "embedded:ridge", *SHORT, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "embedded:ridge" in done.stderr
    assert not (tmp_path / "run").exists()


def test_plan_from_configurations_alone(run_cli, tmp_path):
    shape = {
        "model_type": "qwen3",
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    for name, layers, inner in (("small", 40, 17408), ("large", 64, 25600)):
        (tmp_path / name).mkdir()
        config = {**shape, "num_hidden_layers": layers, "hidden_size": 5120, "intermediate_size": inner, "max_position_embeddings": 40960}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    done = run_cli("plan", tmp_path / "small", tmp_path / "large", "--tflops", 100, "--bandwidth", 1000, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mapper_parameters"] == 2 * 64 * 8 * (8 * 8 * 128) * 128
    assert "estimates" in found["time_rule"]
    shown = run_cli("plan", tmp_path / "small", tmp_path / "large", "--k", "all", "--no-times")
    assert shown.returncode == 0, shown.stderr
    assert "5.369 B" in shown.stdout  # 2 * 64 * 1024 * 40 * 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", "many"), "--k 'many'"),
        (("--k", "9"), "k = 9, but the source has 4 layers"),
        (("--lengths", "8,4"), "--lengths '8,4'"),
        (("--bandwidth", "10"), "give that too"),
        (("--k", "2", "--tflops", "0"), "--tflops 0.0; it must be positive"),
        (("--recipe", "magic"), "recipe 'magic' has no plan"),
    ],
)
def test_plans_that_cannot_be_made(arguments, message):
    error = _refusal(plan.plan, [*PAIR, *arguments])
    assert message in str(error)


def _refusal(command, arguments):
    """The error that a command ends with, in this process."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert isinstance(result.exception, KVBenchError), result.output
    assert result.exception.exit_code == 2
    assert "loading" not in result.output
    return result.exception
