"""The SmolLM2 pair on real data, against figures of an independent implementation (../shared/data/reference/smol_pair.json)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvbench.runs import load_frame

pytestmark = [pytest.mark.slow, pytest.mark.smol]
CHUNKS = 6
ARMS = ("target", "source", "ridge", "zero", "raw")


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared_data / "reference" / "smol_pair.json").read_text())
    return found


@pytest.fixture(scope="module")
def moments(run_cli, smol_pair, shared_data, tmp_path_factory) -> Path:
    """The reference's protocol: file order, 64 sequences of 512 tokens to fit, 16 held out, every token, float32."""
    out = tmp_path_factory.mktemp("smol-run") / "moments"
    text = shared_data / "calibration" / "openstax_biology.jsonl"
    sizes = ("--sequences", 64, "--heldout", 16, "--seq-len", 512, "--stride", 1, "--no-shuffle")
    done = run_cli("calibrate", *smol_pair, "--data", text, *sizes, "--dtype", "float32", "--out", out, timeout=2400)
    assert done.returncode == 0, done.stderr
    return out


def _fit(run_cli, moments: Path, recipe: str) -> tuple[Path, dict[str, Any]]:
    out = moments.parent / recipe
    done = run_cli("fit", moments, "--recipe", recipe, "--set", "k=8", "--out", out, timeout=1200)
    assert done.returncode == 0, done.stderr
    return out, json.loads((out / "manifest.json").read_text())["fit"]


@pytest.fixture(scope="module")
def ridge(run_cli, moments) -> tuple[Path, dict[str, Any]]:
    return _fit(run_cli, moments, "ridge")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("recipe", ["ridge", "head_local"])
def test_fit_agrees_with_the_reference(run_cli, moments, ridge, reference, recipe):
    fitted = ridge[1] if recipe == "ridge" else _fit(run_cli, moments, recipe)[1]
    wanted = reference[recipe]
    for kind in ("k", "v"):
        for part in ("heldout", "insample"):
            assert _mean(fitted[f"r2_{kind}_{part}"]) == pytest.approx(wanted[f"r2_{kind}_{part}"], abs=0.01)
        best = [max(column) for column in zip(*fitted[f"single_source_r2_{kind}"], strict=True)]
        assert _mean(best) == pytest.approx(wanted[f"best_single_{kind}"], abs=0.01)
    same = sum(a == b for a, b in zip(fitted["source_layers"], wanted["selected"], strict=True))
    assert same >= 28


def test_every_arm_agrees_with_the_reference(run_cli, smol_pair, shared_data, ridge, reference):
    path = ridge[0].parent / "run"
    arguments = ("--tasks", "arc_easy", "--data-dir", shared_data, "--batch-size", 16, "--dtype", "float32")
    done = run_cli("evaluate", *smol_pair, "--mapper", f"ridge={ridge[0]}", *arguments, "--out", path, timeout=2400)
    assert done.returncode == 0, done.stderr
    frame = load_frame(path)
    wanted = reference["ridge"]
    for arm in ARMS:
        rows = frame[frame.arm == arm]
        assert len(rows) == 300
        for metric, key in (("acc", "arc_acc"), ("acc_norm", "arc_acc_norm")):
            right = rows[f"metric.{metric}"].sum()
            assert abs(right - 300 * wanted[key][arm]) <= 3, (arm, metric)


def test_prefix_perplexity_agrees_with_the_reference(run_cli, smol_pair, shared_data, ridge, reference):
    path = ridge[0].parent / "wiki"
    arguments = ("--tasks", "wikitext2_prefix", "--metadata", "prefix_tokens=512", "--data-dir", shared_data, "--limit", CHUNKS, "--dtype", "float32")
    done = run_cli("evaluate", *smol_pair, "--mapper", f"ridge={ridge[0]}", *arguments, "--out", path, timeout=2400)
    assert done.returncode == 0, done.stderr
    frame = load_frame(path)
    for arm in ARMS:
        rows = frame[frame.arm == arm].sort_values("doc_id")
        found = list(rows["metric.token_perplexity"] / rows["size.token_perplexity"])
        wanted = reference["ridge"]["wiki_nll_per_chunk"][arm][:CHUNKS]
        assert math.exp(_mean(found)) == pytest.approx(math.exp(_mean(wanted)), rel=0.01)
        if arm in ("target", "source", "zero"):
            assert found == pytest.approx(wanted, abs=1e-3)


def test_diagnostics_agree_with_the_reference(smol_pair, shared_data, ridge, reference):
    """Native cosine by layer, KL and agreement on the first chunks; all 24 give 0.9626, 0.8536 (worst layer), 0.1838 nats and 0.8046."""
    import numpy as np

    from kvbench.diagnostics.diagnose import DiagnoseSettings, diagnose
    from kvbench.mappers.artifact import load_mapper
    from kvbench.pairs.models import load_model

    source, target = (load_model(str(path), dtype="float32") for path in smol_pair)
    pages = [json.loads(line)["page"] for line in (shared_data / "wikitext2" / "test.jsonl").read_text().splitlines()]
    ids = target.tokenizer("".join(pages), add_special_tokens=False)["input_ids"][: CHUNKS * 1024]
    tokens = np.array(ids, dtype=np.int32).reshape(CHUNKS, 1024)
    found = diagnose(
        source, target, {"ridge": load_mapper(ridge[0])[0]}, tokens, DiagnoseSettings((512,), 512, batch_size=2, greedy_tokens=0), fitted=["ridge"]
    )
    wanted = reference["ridge"]
    cosine = wanted["attention_output_cosine_native"]
    layers = found.entry("ridge").cosine_native
    # These chunks are a quarter of the reference's, so layers are held together and not digits.
    assert layers == pytest.approx(cosine["per_layer"], abs=0.03)
    assert _mean(layers) == pytest.approx(cosine["mean"], abs=0.01)
    assert layers.index(min(layers)) == cosine["per_layer"].index(min(cosine["per_layer"]))
    nll = {arm: wanted["wiki_nll_per_chunk"][arm][:CHUNKS] for arm in ("target", "ridge", "source")}
    assert found.figure("ridge", "nll_difference").value == pytest.approx(_mean(nll["ridge"]) - _mean(nll["target"]), abs=0.01)
    assert found.figure("source", "nll_difference").value == pytest.approx(_mean(nll["source"]) - _mean(nll["target"]), abs=1e-3)
    assert found.figure("ridge", "top1_agreement").value == pytest.approx(wanted["top1_agreement"], abs=0.03)
    assert 0.1 < found.figure("ridge", "kl_nats").value < 0.3


def test_large_to_small(run_cli, smol_pair, shared_data, tmp_path):
    """The pair swapped: the large model prefills, the small one answers from the mapped cache."""
    source, target = smol_pair
    text = shared_data / "calibration" / "openstax_biology.jsonl"
    sizes = ("--sequences", 24, "--heldout", 4, "--seq-len", 512, "--stride", 2)
    done = run_cli("calibrate", target, source, "--data", text, *sizes, "--out", tmp_path / "m", timeout=1200)
    assert done.returncode == 0, done.stderr
    assert run_cli("fit", tmp_path / "m", "--set", "k=4", "--out", tmp_path / "ridge", timeout=600).returncode == 0
    arguments = ("--tasks", "wikitext2_prefix", "--metadata", "prefix_tokens=256", "--data-dir", shared_data, "--limit", 4)
    done = run_cli("evaluate", target, source, "--mapper", f"ridge={tmp_path / 'ridge'}", *arguments, "--out", tmp_path / "run", timeout=1200)
    assert done.returncode == 0, done.stderr
    frame = load_frame(tmp_path / "run")
    per_token = frame["metric.token_perplexity"] / frame["size.token_perplexity"]
    nll = {arm: float(per_token[frame.arm == arm].mean()) for arm in ARMS}
    # target here is the small model, which is the weaker of the two; its cache mapped from the large one must beat no cache by far
    assert nll["ridge"] < nll["zero"]
    assert nll["ridge"] - nll["target"] < 0.3 * (nll["zero"] - nll["target"])
