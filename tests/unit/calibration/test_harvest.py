"""The calibration pass: right, killable, refusing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.calibration.planning import MemoryPlan
from kvbench.errors import ArtifactError, BadInputError
from kvbench.kv.capture import to_content


@pytest.fixture
def blocks():
    rng = np.random.default_rng(0)
    return TokenBlocks(rng.integers(3, 200, (12, 16), dtype=np.int32), rng.integers(3, 200, (4, 16), dtype=np.int32), 3, 1)


def _harvest(tiny, blocks, out, **settings):
    return Harvest(
        tiny(layers=3, seed=1), tiny(layers=4, seed=2), blocks, {"name": "test", "seed": 0}, HarvestSettings(**settings), out, checkpoint_seconds=0
    )


def test_moments_equal_a_plain_computation(tiny, blocks, tmp_path):
    harvest = _harvest(tiny, blocks, tmp_path / "m", stride=2, batch_size=5, rotated=True)
    harvest.run()
    calibration = Calibration(tmp_path / "m")
    features = {}
    for model in (harvest.source, harvest.target):
        kv = model.prefill(blocks.fit.tolist())
        content = to_content(kv, model.rope)
        for kind, layers in (("k", content.keys), ("v", content.values), ("k_rotated", [k.transpose(1, 2) for k in kv.keys])):
            features.setdefault(kind, []).append(torch.cat([t[:, ::2].reshape(12 * 8, -1) for t in layers], 1).double())
    for kind, (x, y) in features.items():
        m = calibration.moments("fit", kind)
        xc, yc = x - x.mean(0), y - y.mean(0)
        assert m.rows == 96
        torch.testing.assert_close(m.xx, xc.T @ xc, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(m.xy, xc.T @ yc, rtol=1e-4, atol=1e-3)
    assert calibration.manifest["data"]["rows"] == 96


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("after", [3, 7, 10])
def test_killed_and_resumed_equals_straight(tiny, blocks, tmp_path, monkeypatch, after, separate):
    monkeypatch.setattr("kvbench.calibration.harvest.CHUNK_ROWS", 16)
    straight = _harvest(tiny, blocks, tmp_path / "straight", stride=1, batch_size=1, separate_passes=separate)
    straight.run()
    killed = _harvest(tiny, blocks, tmp_path / "killed", stride=1, batch_size=1, separate_passes=separate)
    calls = 0

    def kill(done, total):
        nonlocal calls
        calls += 1
        if calls == after:
            raise Killed

    with pytest.raises(Killed):
        killed.run(kill)
    assert not (tmp_path / "killed").exists()
    resumed = _harvest(tiny, blocks, tmp_path / "killed", stride=1, batch_size=1, separate_passes=separate)
    seen = []
    resumed.run(lambda done, total: seen.append(done))
    assert seen[0] > 16, "the resumed run started from the beginning"
    a, b = Calibration(tmp_path / "straight"), Calibration(tmp_path / "killed")
    for part in ("fit", "heldout"):
        for kind in ("k", "v"):
            for name in ("xx", "xy", "yy", "mean_x", "mean_y"):
                assert torch.equal(getattr(a.moments(part, kind), name), getattr(b.moments(part, kind), name))
    assert not (tmp_path / "killed.partial").exists()


def test_a_checkpoint_of_other_settings_is_refused_and_named(tiny, blocks, tmp_path):
    first = _harvest(tiny, blocks, tmp_path / "m", batch_size=1)
    with pytest.raises(Killed):
        first.run(lambda done, total: (_ for _ in ()).throw(Killed))
    with pytest.raises(BadInputError, match="stride"):
        _harvest(tiny, blocks, tmp_path / "m", batch_size=1, stride=2).run()


def test_separate_passes_give_the_same_moments_with_less_memory(tiny, blocks, tmp_path):
    together = _harvest(tiny, blocks, tmp_path / "a")
    apart = _harvest(tiny, blocks, tmp_path / "b", separate_passes=True)
    assert apart.memory_plan().moments < together.memory_plan().moments
    together.run()
    apart.run()
    for kind in ("k", "v"):
        assert torch.equal(Calibration(tmp_path / "a").moments("fit", kind).xy, Calibration(tmp_path / "b").moments("fit", kind).xy)


def test_too_large_a_plan_is_refused_with_the_remedies():
    plan = MemoryPlan(moments=10**12, disk=1, rows=1, models=1, available=10**9)
    with pytest.raises(BadInputError, match=r"--source-layers.*--separate-passes"):
        plan.refuse_if_too_large()


def test_candidate_layers(tiny, blocks, tmp_path):
    harvest = _harvest(tiny, blocks, tmp_path / "m", source_layers=(2, 0))
    harvest.run()
    calibration = Calibration(tmp_path / "m")
    assert calibration.source_layers == (0, 2)
    assert calibration.columns([2])[0] == 16
    with pytest.raises(BadInputError, match="not among the calibrated"):
        calibration.columns([1])
    with pytest.raises(BadInputError, match="layers 0 to 2"):
        _harvest(tiny, blocks, tmp_path / "n", source_layers=(5,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_activations_name_model_layer_and_batch(tiny, blocks, tmp_path, value):
    harvest = _harvest(tiny, blocks, tmp_path / "m")
    harvest.source.blocks[1].self_attn.k_proj.weight.data[0, 0] = value
    with pytest.raises(BadInputError, match=r"tiny-llama-3-1: non-finite keys in layer 1, batch at fit sequence 0"):
        harvest.run()


def test_damaged_and_foreign_directories(tiny, blocks, tmp_path):
    _harvest(tiny, blocks, tmp_path / "m").run()
    manifest = tmp_path / "m" / "manifest.json"
    original = manifest.read_text()
    manifest.write_text(original.replace('"name": "test"', '"name": "best"'))
    with pytest.raises(ArtifactError, match="was changed"):
        Calibration(tmp_path / "m")
    newer = json.loads(original)
    newer["format_version"] = 99
    manifest.write_text(json.dumps(newer))
    with pytest.raises(ArtifactError, match="format version 99"):
        Calibration(tmp_path / "m")
    manifest.write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        Calibration(tmp_path / "m")
    with pytest.raises(BadInputError, match="exists already"):
        _harvest(tiny, blocks, tmp_path / "m").run()
