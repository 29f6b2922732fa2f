"""Plans against what was published of real pairs.

Published dimensions: the config.json files of Qwen/Qwen3-{4B,8B,14B,32B} and Qwen/Qwen3-1.7B, meta-llama/Llama-3.1-{8B,70B},
mistralai/Ministral-3-{3B,8B,14B}-2512 (language model part), mistralai/Ministral-8B-Instruct-2410, mistralai/Mistral-Nemo-Base-2407,
Qwen/Qwen2.5-{1.5B,3B}. Published sizes: shared/FACTS.md (sections 1, 2) and shared/seeds/ (000: parameters and GB; 001: kvxfer's README).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.errors import BadInputError
from kvbench.kv import kernels
from kvbench.mappers.artifact import load_mapper
from kvbench.mappers.head_local import HeadLocal
from kvbench.mappers.low_rank import LowRank
from kvbench.mappers.ridge import Ridge
from kvbench.pairs.locate import load_config, resolve
from kvbench.pairs.models import load_model
from kvbench.paths import mappers_directory
from kvbench.timing import plan
from kvbench.timing.plan import PlanSettings, Rates, given_rates, plan_pair, planned
from kvbench.timing.stages import stage_peaks


def _config(kind: str, layers: int, hidden: int, inner: int, heads: int, vocabulary: int, kv_heads: int = 8, *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }


CONFIGS = {
    "qwen3-1.7b": _config("qwen3", 28, 2048, 6144, 16, 151936, tied=True),
    "qwen3-4b": _config("qwen3", 36, 2560, 9728, 32, 151936, tied=True),
    "qwen3-8b": _config("qwen3", 36, 4096, 12288, 32, 151936),
    "qwen3-14b": _config("qwen3", 40, 5120, 17408, 40, 151936),
    "qwen3-32b": _config("qwen3", 64, 5120, 25600, 64, 151936),
    "llama-3.1-8b": _config("llama", 32, 4096, 14336, 32, 128256),
    "llama-3.1-70b": _config("llama", 80, 8192, 28672, 64, 128256),
    "ministral-3-3b": _config("ministral3", 26, 3072, 9216, 32, 131072, tied=True),
    "ministral-3-8b": _config("ministral3", 34, 4096, 14336, 32, 131072),
    "ministral-3-14b": _config("ministral3", 40, 5120, 16384, 32, 131072),
    "ministral-8b-2410": _config("mistral", 36, 4096, 12288, 32, 131072),
    "mistral-nemo": _config("mistral", 40, 5120, 14336, 32, 131072),
    "qwen2.5-1.5b": _config("qwen2", 28, 1536, 8960, 12, 151936, 2, tied=True),
    "qwen2.5-3b": _config("qwen2", 36, 2048, 11008, 16, 151936, 2, tied=True),
}
PAPER_PAIRS = (
    ("qwen3-14b", "qwen3-32b", 8),
    ("qwen3-8b", "qwen3-32b", 12),
    ("llama-3.1-8b", "llama-3.1-70b", 20),
    ("ministral-3-3b", "ministral-3-8b", "all"),
    ("ministral-3-3b", "ministral-3-14b", 20),
    ("ministral-3-8b", "ministral-3-14b", 12),
)
ONE_PER_CENT = 0.01


@pytest.fixture
def model(tmp_path: Path):
    """Writes a published configuration and reads it back as a user's directory."""

    def write(name: str):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        return planned(load_config(resolve(str(folder))))

    return write


@pytest.mark.parametrize(("source", "target", "k"), PAPER_PAIRS)
def test_the_six_pairs_of_the_paper(model, source, target, k):
    found = plan_pair(model(source), model(target), PlanSettings(k=k))
    layers, taken = CONFIGS[target]["num_hidden_layers"], CONFIGS[source]["num_hidden_layers"] if k == "all" else k
    # arXiv:2608.03893: 2 * L_t * n_kv * (k * n_kv * d_h) * d_h parameters, written out.
    assert found.mapper_parameters == 2 * layers * 8 * (taken * 8 * 128) * 128
    # Biases are the rest of the artifact: one per target coordinate.
    assert found.artifact_bytes["float32"] == 4 * (found.mapper_parameters + 2 * layers * 1024)
    assert found.artifact_bytes["bfloat16"] * 2 == found.artifact_bytes["float32"]


def test_the_published_range_of_sizes(model):
    sizes = [plan_pair(model(s), model(t), PlanSettings(k=k)).mapper_parameters for s, t, k in PAPER_PAIRS]
    # Seed 000: "1.01-3.36 B mapper parameters".
    assert min(sizes) == pytest.approx(1.01e9, rel=ONE_PER_CENT)
    assert max(sizes) == pytest.approx(3.36e9, rel=ONE_PER_CENT)
    # Seed 000 rounds their float32 sizes to "4-12 GB". The smaller is 4.03 GB; 3.36 B entries are 13.4 GB, or 12.5 GiB: 12 can only be GiB, cut off.
    assert 4 * min(sizes) == pytest.approx(4e9, rel=ONE_PER_CENT)
    assert int(4 * max(sizes) / 2**30) == 12


def test_cachebridge_sizes(model):
    # arXiv:2609.00891: full head 4.30 GB, head local 0.54 GB (Qwen3 14B->32B at k = 8, float32).
    pair = model("qwen3-14b"), model("qwen3-32b")
    assert plan_pair(*pair, PlanSettings(k=8)).artifact_bytes["float32"] == pytest.approx(4.30e9, rel=ONE_PER_CENT)
    assert plan_pair(*pair, PlanSettings(k=8, recipe="head_local")).artifact_bytes["float32"] == pytest.approx(0.54e9, rel=ONE_PER_CENT)


def test_kvxfer_sizes(model):
    # Seed 001: "the same map is 302M parameters for Qwen3 and 18.9M for Qwen2.5" (k = 4).
    qwen3 = plan_pair(model("qwen3-1.7b"), model("qwen3-4b"), PlanSettings(k=4))
    assert qwen3.mapper_parameters == pytest.approx(302e6, rel=ONE_PER_CENT)
    qwen2 = plan_pair(model("qwen2.5-1.5b"), model("qwen2.5-3b"), PlanSettings(k=4))
    assert qwen2.mapper_parameters == pytest.approx(18.9e6, rel=ONE_PER_CENT)
    # Seed 001: 94.4M trained parameters of the residual, whose bottleneck is 256.
    residual = plan_pair(model("qwen3-1.7b"), model("qwen3-4b"), PlanSettings(k=4, recipe="residual"))
    assert residual.mapper_parameters - qwen3.mapper_parameters == pytest.approx(94.4e6, rel=ONE_PER_CENT)


def test_kvxfer_models_and_ceilings(model):
    # Seed 001: Qwen3-4B 4.02 B and Mistral-Nemo 12.25 B parameters; "FLOP ceiling" target over mapper 13.3x and 36.5x.
    qwen, nemo = model("qwen3-4b"), model("mistral-nemo")
    assert qwen.geometry.parameters == pytest.approx(4.02e9, rel=ONE_PER_CENT)
    assert nemo.geometry.parameters == pytest.approx(12.25e9, rel=ONE_PER_CENT)
    qwen_map = plan_pair(model("qwen3-1.7b"), qwen, PlanSettings(k=4)).mapper_parameters
    assert qwen.geometry.parameters / qwen_map == pytest.approx(13.3, rel=ONE_PER_CENT)
    ministral = model("ministral-8b-2410")
    nemo_map = plan_pair(ministral, nemo, PlanSettings(k=4)).mapper_parameters
    assert nemo.geometry.parameters / nemo_map == pytest.approx(36.5, rel=ONE_PER_CENT)
    # Seed 001: the pair's weights are "37.8 GB of bf16", beside 22 GiB of memory: GiB as well.
    stages = plan_pair(ministral, nemo, PlanSettings(k=4)).stages
    weights = next(s for s in stages if s.name == "calibrate").parts
    assert (weights["source weights"] + weights["target weights"]) / 2**30 == pytest.approx(37.8, rel=ONE_PER_CENT)


def test_moments_of_a_large_pair_by_hand(model):
    found = plan_pair(model("qwen3-14b"), model("qwen3-32b"), PlanSettings())
    px, py = 40 * 1024, 64 * 1024
    # Fit and held-out part, keys and values: X'X, X'Y, means of both, diagonal of Y'Y, float64.
    assert found.moments_bytes == 2 * 2 * 8 * (px * px + px * py + px + py + py)
    assert found.target_cache_bytes_per_token == 2 * 64 * 8 * 128 * 2
    assert found.source_cache_bytes_per_token == 2 * 40 * 8 * 128 * 2


def test_times_follow_from_the_rates(model):
    pair = model("qwen3-14b"), model("qwen3-32b")
    found = plan_pair(*pair, PlanSettings(lengths=(1024,)), Rates(1e15, 5e14, 1e30, "made up"))
    prefill = next(s for s in found.stages if s.name == "target prefill")
    body = 64 * (5120 * 128 * (2 * 64 + 2 * 8) + 3 * 5120 * 25600)
    pairs = 1024 * 1025 // 2
    assert prefill.operations == 2 * body * 1024 + 64 * 4 * 64 * 128 * pairs
    assert prefill.seconds == pytest.approx(prefill.operations / 1e15)
    slow = plan_pair(*pair, PlanSettings(lengths=(1024,)), Rates(1e30, 5e14, 1e9, "made up"))
    # With no end of operations the weights still have to be read once.
    assert next(s for s in slow.stages if s.name == "target prefill").seconds == pytest.approx(pair[1].geometry.parameters * 2 / 1e9)
    assert all(s.seconds is None for s in plan_pair(*pair, PlanSettings()).stages)


def test_given_rates():
    assert given_rates(100, None, None)[:2] == (1e14, 5e13)
    assert given_rates(100, 2000, 40)[:3] == (1e14, 4e13, 2e12)
    with pytest.raises(BadInputError, match="--bandwidth -1"):
        given_rates(100, -1, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PlanSettings(recipe="magic"), "recipe 'magic' has no plan"),
        (PlanSettings(k=41), "k = 41, but the source has 40 layers"),
        (PlanSettings(k=0), "k = 0"),
        (PlanSettings(recipe="low_rank"), "needs --rank"),
        (PlanSettings(dtype="int4"), "dtype 'int4' is unknown"),
        (PlanSettings(stride=0), "stride = 0"),
        (PlanSettings(lengths=(0,)), "lengths 0"),
    ],
)
def test_what_cannot_be_planned(model, settings, message):
    with pytest.raises(BadInputError, match=message):
        plan_pair(model("qwen3-14b"), model("qwen3-32b"), settings)


def test_planned_parameters_are_those_of_a_fitted_mapper(tmp_path):
    source, target = load_model("embedded:source"), load_model("embedded:target")
    rng = np.random.default_rng(0)
    fit, heldout = (rng.integers(0, len(target.tokenizer), (n, 32)).astype(np.int32) for n in (6, 3))
    harvest = Harvest(source, target, TokenBlocks(fit, heldout, 6, 3), {"name": "made", "seed": 0}, HarvestSettings(stride=1), tmp_path / "moments")
    calibration = Calibration(harvest.run())
    shapes = planned(source.config), planned(target.config)
    for recipe, settings in (
        (Ridge(k=2), PlanSettings(k=2, lengths=(32,))),
        (HeadLocal(k="all"), PlanSettings(k="all", recipe="head_local", lengths=(32,))),
        (LowRank(k=2, rank=5), PlanSettings(k=2, recipe="low_rank", rank=5, lengths=(32,))),
    ):
        found = plan_pair(*shapes, settings)
        mapper = recipe.fit(calibration)
        assert found.mapper_parameters == mapper.parameters()
        assert found.artifact_bytes["float32"] == 4 * sum(tensor.numel() for _, tensor in mapper.tensors())
    # The moments file as planned, but for its header and the row counts.
    assert sum(f.stat().st_size for f in (tmp_path / "moments").glob("moments.*.safetensors")) == pytest.approx(found.moments_bytes, abs=5000)


def test_planned_peaks_are_near_the_measured_ones():
    """Found on the SmolLM2 pair: content and activations were missing, and an evaluation took half as much again as planned."""
    source, target = (load_model(f"embedded:{name}", dtype="float32") for name in ("source", "target"))
    mapper = load_mapper(mappers_directory() / "artifacts" / "embedded-ridge")[0]
    peaks = {p.stage: p for p in stage_peaks(source, target, {"ridge": mapper}, Ridge(k=4), tokens=768)}
    for stage in ("apply, ridge", "evaluate"):
        assert peaks[stage].planned_bytes == pytest.approx(peaks[stage].peak_bytes, rel=0.15), stage


def test_the_plan_knows_the_block_of_the_kernels():
    assert plan.BLOCK_ROWS == kernels.BLOCK_ROWS
