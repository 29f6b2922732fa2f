"""Pairs whose models differ in KV heads or head width: refused unless asked for, then mapped by rectangular full-head maps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.errors import BadInputError, IncompatiblePairError
from kvbench.kv.capture import to_content
from kvbench.mappers.artifact import caveats, load_mapper, save_mapper
from kvbench.mappers.recipes import load_recipe
from kvbench.scoring.arms import mapper_arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.lm import KVTransferLM
from kvbench.scoring.run import arm_spec
from kvbench.scoring.scorer import SharedScorer

# Source: 4 heads of 8 = 32 features, all of a hidden state of 32. Target: 1 head of 16, or 8 of 8.
SOURCE = {"layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8}
TARGETS = {"head width": {"heads": 2, "kv_heads": 1, "head_dim": 16}, "heads": {"heads": 8, "kv_heads": 8, "head_dim": 8}}


def _blocks() -> TokenBlocks:
    rng = np.random.default_rng(0)
    return TokenBlocks(rng.integers(3, 200, (24, 16), dtype=np.int32), rng.integers(3, 200, (6, 16), dtype=np.int32), 3, 1)


def _pair(tiny: Any, target: dict[str, int]) -> tuple[Any, Any]:
    """Both first layers read the same embeddings, so that the target's first keys and values are linear in the source's."""
    models = tiny(seed=1, **SOURCE), tiny(layers=3, seed=2, **target)
    with torch.no_grad():
        models[1].model.get_input_embeddings().weight.copy_(models[0].model.get_input_embeddings().weight)
    return models


def _calibrate(models: tuple[Any, Any], out: Path) -> Calibration:
    Harvest(*models, _blocks(), {"name": "random tokens", "seed": 0}, HarvestSettings(stride=1), out).run()
    return Calibration(out)


def _attention(model: Any) -> Any:
    return model.model.model.layers[0].self_attn


@pytest.mark.parametrize("shape", TARGETS)
def test_a_planted_rectangular_relation_is_recovered(tiny, tmp_path, shape):
    source, target = _pair(tiny, TARGETS[shape])
    calibration = _calibrate((source, target), tmp_path / "m")
    mapper = load_recipe("ridge", ["k=1", "selection=0", "lambda=1e-6"]).fit(calibration)
    tensors = dict(mapper.tensors())
    for kind in "kv":
        # K_s = x A' and K_t = x B' with A square: the planted map is inv(A') B'.
        a, b = (getattr(_attention(model), f"{kind}_proj").weight.detach().double() for model in (source, target))
        planted = torch.linalg.solve(a.T, b.T)
        assert planted.shape == (32, target.kv_heads * target.head_dim)
        assert tensors[f"target.0.{kind}.W"].shape == planted.shape
        torch.testing.assert_close(tensors[f"target.0.{kind}.W"].double(), planted, atol=2e-2, rtol=2e-2)
    rows = _blocks().heldout.tolist()
    mapped = mapper.map_layer(to_content(source.prefill(rows), source.rope), 0)
    wanted = to_content(target.prefill(rows), target.rope)
    for found, own in zip(mapped, (wanted.keys[0], wanted.values[0]), strict=True):
        torch.testing.assert_close(found.float(), own.float(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("recipe", ["ridge", "low_rank", "mean", "head_local", "attn_repair"])
def test_head_wise_recipes_refuse_and_the_others_fit(tiny, tmp_path, recipe):
    models = _pair(tiny, TARGETS["head width"])
    calibration = _calibrate(models, tmp_path / "m")
    settings = {"mean": [], "low_rank": ["k=2", "rank=2"]}.get(recipe, ["k=2"])
    chosen = load_recipe(recipe, settings)
    if recipe in ("head_local", "attn_repair"):
        with pytest.raises(
            BadInputError, match=f"'{recipe}' maps head by head, but the source has 4 KV heads of 8 and the target 1 of 16; use 'ridge'"
        ):
            chosen.fit(calibration, models=models)
        return
    mapper = chosen.fit(calibration)
    saved = save_mapper(mapper, tmp_path / "a", recipe=chosen.configuration(), calibration=calibration.manifest)
    assert saved.experimental
    again, manifest = load_mapper(tmp_path / "a")
    content = to_content(models[0].prefill([[5, 9, 13], [7, 8, 9]]), models[0].rope)
    for layer in range(3):
        for first, second in zip(mapper.map_layer(content, layer), again.map_layer(content, layer), strict=True):
            assert first.shape == (2, 3, 1, 16)
            assert torch.equal(first, second)
    assert caveats(manifest)["experimental"].startswith("mismatched KV, 4 x 8 -> 1 x 16")


def test_arms_score_and_copying_controls_refuse(tiny, tmp_path):
    source, target = _pair(tiny, TARGETS["head width"])
    calibration = _calibrate((source, target), tmp_path / "m")
    recipe = load_recipe("ridge", ["k=2"])
    save_mapper(recipe.fit(calibration), tmp_path / "ridge", recipe=recipe.configuration(), calibration=calibration.manifest)
    ridge = mapper_arm(str(tmp_path / "ridge"), source, target)
    assert str(arm_spec(ridge, "ridge").pin["experimental"]).startswith("mismatched KV")
    for control in ("raw", "identity"):
        with pytest.raises(BadInputError, match=r"4 KV heads of 8|equally deep"):
            mapper_arm(control, source, target)
    with pytest.raises(BadInputError, match="control 'identity' puts the source cache into the target as it is"):
        mapper_arm("identity", source, tiny(layers=2, **TARGETS["heads"]))
    arms = [own_prefill("target", target), own_prefill("source", source), ridge]
    arms += [mapper_arm(name, source, target) for name in ("zero", "random", "oracle", "shuffled")]
    scorer = SharedScorer(TransferEngine(source, target, arms), batch_size=2, max_length=512)
    requests = [((5, 9, 13, 17), (21, 4)), ((2, 4, 8), (3,)), ((6, 7, 9, 11, 13), (5, 5))]
    scores = {arm.name: [s.logprob for s in scorer.loglikelihoods(arm.name, requests)] for arm in arms}
    assert scores["oracle"] == pytest.approx(scores["target"], abs=1e-4)
    assert all(np.isfinite(row).all() for row in scores.values())
    assert scores["ridge"] != pytest.approx(scores["target"], abs=1e-4)


def test_equal_shapes_are_not_experimental(tiny, tmp_path):
    models = tiny(seed=1), tiny(layers=4, seed=2)
    calibration = _calibrate(models, tmp_path / "m")
    recipe = load_recipe("ridge", ["k=1"])
    saved = save_mapper(recipe.fit(calibration), tmp_path / "a", recipe=recipe.configuration(), calibration=calibration.manifest)
    assert not saved.experimental
    assert caveats(saved.model_dump()) == {}


@pytest.fixture
def on_disk(tiny, tmp_path) -> dict[str, str]:
    places = {}
    for role, model in zip(("source", "target"), _pair(tiny, TARGETS["head width"]), strict=True):
        model.model.save_pretrained(tmp_path / role)
        model.tokenizer.save_pretrained(tmp_path / role)
        places[role] = str(tmp_path / role)
    return places


def test_the_whole_way_on_the_command_line_and_in_lm_eval(on_disk, tmp_path, run_cli, caplog):
    pair, allow = (on_disk["source"], on_disk["target"]), "--allow-mismatched"
    calibrate = ("calibrate", *pair, "--data", "embedded:world", "--sequences", 12, "--heldout", 3, "--seq-len", 64, "--out", tmp_path / "m")
    refused = run_cli(*calibrate)
    assert refused.returncode == 4
    assert "kv heads (source 4, target 1)" in refused.stderr
    done = run_cli(*calibrate, allow)
    assert done.returncode == 0, done.stderr
    assert "Experimental" in done.stderr
    fitted = run_cli("fit", tmp_path / "m", "--set", "k=2", "--out", tmp_path / "ridge")
    assert fitted.returncode == 0, fitted.stderr
    shown = run_cli("mapper", "show", tmp_path / "ridge")
    assert "experimental: mismatched KV, 4 x 8 -> 1 x 16" in shown.stdout

    evaluate = ("evaluate", *pair, "--mapper", tmp_path / "ridge", "--tasks", "tiny_choice", "--limit", 4, "--out", tmp_path / "run")
    assert run_cli(*evaluate).returncode == 4
    done = run_cli(*evaluate, allow)
    assert done.returncode == 0, done.stderr
    assert "mapper 'ridge': experimental: mismatched KV" in done.stderr
    arms = {arm["name"]: arm for arm in json.loads((tmp_path / "run" / "spec.json").read_text())["arms"]}
    assert set(arms) == {"target", "source", "ridge", "zero", "random"}
    assert arms["ridge"]["pin"]["experimental"].startswith("mismatched KV")

    arguments = {"pretrained": pair[1], "source": pair[0], "mapper": str(tmp_path / "ridge"), "device": "cpu", "dtype": "float32", "batch_size": 2}
    with pytest.raises(IncompatiblePairError, match="kv heads"):
        KVTransferLM(**arguments)
    with caplog.at_level(logging.WARNING, logger="kvbench"):
        lm = KVTransferLM(**arguments, allow_mismatched="true")
    assert "experimental: mismatched KV" in caplog.text
    requests = [Instance("loglikelihood", {}, ("the fox sees a dog", " red"), i) for i in range(2)]
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    assert all(np.isfinite(logprob) and logprob < 0 for logprob, _ in answers)
