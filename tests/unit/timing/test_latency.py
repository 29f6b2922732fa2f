"""The timing harness: what is timed, in what order, and what happens when memory runs out. No time is asserted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbench.errors import BadInputError
from kvbench.mappers.controls import Identity, Raw
from kvbench.runs.latency import Latency, LatencyPoint
from kvbench.scoring.arms import Arm
from kvbench.scoring.engine import TransferEngine
from kvbench.timing import latency, phases
from kvbench.timing.clock import OutOfMemoryError, percentiles, repeat
from kvbench.timing.latency import LatencySettings, measure

QUICK = LatencySettings(lengths=(8, 16), warmups=0, repeats=2)


@pytest.fixture
def pair(tiny):
    return tiny(layers=2), tiny(layers=3, seed=1)


def test_everything_is_measured_and_stored(pair, tmp_path):
    from kvbench.runs.files import read_stored, write_stored

    seen = []
    settings = LatencySettings(lengths=(8, 16), batch_sizes=(1, 2), warmups=1, repeats=3)
    found = measure(*pair, {"raw": Raw(3)}, settings, progress=lambda done, total, what: seen.append((done, total, what)))
    assert {(p.arm, p.cold, p.tokens, p.batch) for p in found.points} == {
        (arm, cold, tokens, batch) for arm, cold in (("re-prefill", False), ("raw", False), ("raw", True)) for tokens in (8, 16) for batch in (1, 2)
    }
    assert all(len(p.seconds) == 3 for p in found.points)
    names = {p.name for p in found.phases}
    assert names == {
        "target prefill", "target first logits", "target prefill and LM head", "source prefill", "transfer", "first token", "strip", "map", "rotate", "inject",
    }  # fmt: skip
    # Cold is warm plus the source's prefill, repeat by repeat.
    prefill = found.phase("source prefill", 16)
    assert found.point("raw", 16, cold=True).seconds == pytest.approx(
        [a + b for a, b in zip(found.point("raw", 16).seconds, prefill.seconds, strict=True)]
    )
    warm, parts = found.point("raw", 16), [found.phase(name, 16, arm="raw") for name in ("transfer", "first token")]
    assert warm.seconds == pytest.approx([sum(both) for both in zip(*(p.seconds for p in parts), strict=True)])
    assert found.dtype == "float32"
    assert found.attention == "sdpa"
    assert found.threads == torch.get_num_threads()
    assert "float32, 1 thread, attention sdpa" in found.conditions
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(done < total for done, total, _ in seen[:-1])
    assert seen[-1][0] == seen[-1][1]
    write_stored(tmp_path / "latency.json", found)
    assert read_stored(tmp_path / "latency.json", Latency) == found


def test_lengths_come_in_random_order_that_the_seed_decides(pair):
    settings = LatencySettings(lengths=tuple(range(4, 20, 2)), warmups=0, repeats=1, with_head=False, breakdown=False)
    orders = [measure(*pair, {}, LatencySettings(**{**settings.__dict__, "seed": seed})).settings["order"] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_warmups_do_not_count():
    calls = []

    def work() -> list[float]:
        calls.append(None)
        return [float(len(calls)), 0.5]

    assert repeat(work, warmups=2, repeats=3, device=torch.device("cpu")) == [(3.0, 4.0, 5.0), (0.5, 0.5, 0.5)]


def test_percentiles_are_numpys():
    seconds = [0.3, 0.1, 0.9, 0.4]
    assert percentiles(seconds) == pytest.approx([np.percentile(seconds, q) for q in (50, 95, 99)])


def test_out_of_memory_ends_a_length_and_not_the_sweep(pair, monkeypatch):
    plain = phases.transfer

    def short(context, *arguments):
        if context.tokens == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return plain(context, *arguments)

    monkeypatch.setattr(phases, "transfer", short)
    found = measure(*pair, {"raw": Raw(3)}, QUICK)
    assert [(e.tokens, e.phase) for e in found.ended] == [(16, "transfer, raw")]
    assert "Tried to allocate 20 GiB" in found.ended[0].reason
    assert found.point("raw", 16) is None
    assert found.point("raw", 8) is not None
    assert found.speedup("raw", 16, cold=False) is None
    # Another error is a bug and not hidden.
    monkeypatch.setattr(phases, "transfer", lambda *a: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        measure(*pair, {"raw": Raw(3)}, QUICK)


def test_what_cannot_fit_is_not_tried_on_a_cpu(pair, monkeypatch):
    monkeypatch.setattr(latency, "available_bytes", lambda: 10)
    found = measure(*pair, {}, QUICK)
    assert len(found.ended) == 2
    assert "needs at least" in found.ended[0].reason
    assert not found.points


@pytest.mark.parametrize("words", ["DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "MPS backend out of memory"])
def test_allocators_of_other_devices_are_understood(words):
    def work() -> list[float]:
        raise RuntimeError(words)

    with pytest.raises(OutOfMemoryError, match="memory"):
        repeat(work, warmups=0, repeats=1, device=torch.device("cpu"))


def test_the_timed_transfer_answers_what_the_target_answers(tiny):
    """Identity between equal models: the first token after the timed transfer is that after the timed re-prefill."""
    model = tiny(layers=3)
    for hold_back in (1, 5):
        context = phases.Context(model, model, torch.randint(0, 50, (2, 24)), hold_back)
        arm = Arm("identity", "target", Identity("identity", "source", 3))
        engine = TransferEngine(model, model, [arm])
        cache = model.cache_for(2, 24, context.prefix)
        engine.map_into(cache, slice(0, 2), 0, arm, model, model.prefill(context.rows()), model)
        with torch.no_grad():
            expected = model.model(input_ids=context.ids).logits[:, -1].argmax(-1)
        assert phases.answer(context, cache).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LatencySettings(lengths=()), r"\(none\)"),
        (LatencySettings(lengths=(0, 8)), "lengths 0,8"),
        (LatencySettings(lengths=(16, 8)), "increasing"),
        (LatencySettings(lengths=(8, 8)), "increasing"),
        (LatencySettings(lengths=(8,), batch_sizes=(-1,)), "batch sizes -1"),
        (LatencySettings(lengths=(8,), repeats=0), "repeats = 0"),
        (LatencySettings(lengths=(8,), warmups=-1), "warmups = -1"),
        (LatencySettings(lengths=(8,), hold_back=8), "leaves nothing to transfer"),
        (LatencySettings(lengths=(8, 513)), "beyond the 512 positions"),
    ],
)
def test_settings_that_cannot_be_measured(pair, settings, message):
    with pytest.raises(BadInputError, match=message):
        measure(*pair, {}, settings)


def test_controls_that_read_the_target_are_refused(pair):
    with pytest.raises(BadInputError, match="'oracle' reads the target's own cache"):
        measure(*pair, {"oracle": Identity("oracle", "target", 3)}, QUICK)
    with pytest.raises(BadInputError, match="cannot be called 're-prefill'"):
        measure(*pair, {"re-prefill": Raw(3)}, QUICK)


def _made(ours: dict[int, tuple[float, ...]], own: dict[int, tuple[float, ...]]) -> Latency:
    points = [
        LatencyPoint(arm=arm, tokens=n, p50_seconds=float(np.median(s)), seconds=s)
        for arm, side in (("m", ours), ("re-prefill", own))
        for n, s in side.items()
    ]
    return Latency(device="made up", points=tuple(points))


def test_speedup_is_a_ratio_of_medians_with_an_interval():
    found = _made({64: (1.0, 1.2, 0.8)}, {64: (3.0, 3.0, 9.0)})
    gain = found.speedup("m", 64, cold=False)
    assert gain.value == pytest.approx(3.0)
    assert gain.n == 3
    assert gain.lower <= gain.value <= gain.upper
    # The slow definition: every resample of both sides weighs alike.
    from itertools import product

    ratios = [np.median(a) / np.median(b) for a in product((3.0, 3.0, 9.0), repeat=3) for b in product((1.0, 1.2, 0.8), repeat=3)]
    assert (gain.lower, gain.upper) == pytest.approx(tuple(np.quantile(ratios, (0.025, 0.975))), rel=0.05)
    assert found.speedup("m", 64, cold=True) is None
    single = _made({64: (1.0,)}, {64: (2.0,)}).speedup("m", 64, cold=False)
    assert (single.value, single.lower, single.upper) == (2.0, None, None)


def test_break_even_needs_every_longer_length():
    own = {n: (2.0, 2.0) for n in (64, 128, 256, 512)}
    slow, fast = (3.0, 3.0), (1.0, 1.0)
    assert _made({64: slow, 128: fast, 256: slow, 512: fast}, own).break_even("m", cold=False) == 512
    assert _made({64: slow, 128: fast, 256: fast, 512: fast}, own).break_even("m", cold=False) == 128
    assert _made({n: fast for n in own}, own).break_even("m", cold=False) == 64
    assert _made({n: slow for n in own}, own).break_even("m", cold=False) is None
