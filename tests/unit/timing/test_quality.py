"""Quality against cost: the Pareto front by its definition, agreement at its two ends."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.errors import BadInputError
from kvbench.mappers.controls import Identity, Zero
from kvbench.runs.latency import QualityPoint
from kvbench.timing.latency import LatencySettings
from kvbench.timing.quality import SUFFIX, QualitySettings, agreement, pareto, quality_points


def _point(seconds: float, kl: float | None = None, accuracy: float | None = None) -> QualityPoint:
    return QualityPoint(label="", arm="m", tokens=8, warm_seconds=seconds, kl_nats=kl, accuracy=accuracy)


def test_pareto_front_by_its_definition():
    rng = np.random.default_rng(0)
    points = [_point(float(s), float(k)) for s, k in rng.integers(1, 9, (40, 2))]
    for point in pareto(points):
        mine = (point.warm_seconds, point.kl_nats)
        better = [q for q in points if q.warm_seconds <= mine[0] and q.kl_nats <= mine[1] and (q.warm_seconds < mine[0] or q.kl_nats < mine[1])]
        assert point.pareto == (not better)


def test_accuracy_decides_where_there_is_no_kl():
    assert [p.pareto for p in pareto([_point(1, accuracy=0.5), _point(2, accuracy=0.4), _point(3, accuracy=0.9)])] == [True, False, True]


def test_agreement_between_equal_models_and_with_nothing(tiny):
    model = tiny(layers=3)
    ids = np.random.default_rng(0).integers(0, 50, (3, 40 + SUFFIX)).astype(np.int32)
    mappers = {"same": Identity("same", "source", 3), "zero": Zero(2, 8)}
    settings = QualitySettings(tokens=40, hold_backs=(1, 8, 32), batch=2)
    found = agreement(model, model, mappers, ids, settings)
    for hold_back in settings.hold_backs:
        assert found["same", hold_back]["kl_nats"] == pytest.approx(0, abs=1e-5)
        assert found["same", hold_back]["top1_agreement"] == 1.0
    assert found["source", None]["kl_nats"] == pytest.approx(0, abs=1e-6)
    # The more the target recomputes itself, the less an empty prefix hurts.
    zero = [found["zero", hold_back]["kl_nats"] for hold_back in settings.hold_backs]
    assert zero[0] > zero[1] > zero[2] > 0


def test_points_of_a_pair(tiny):
    source, target = tiny(layers=2), tiny(layers=3, seed=1)
    ids = np.random.default_rng(0).integers(0, 50, (2, 24 + SUFFIX)).astype(np.int32)
    points = quality_points(
        source, target, {"zero": Zero(2, 8)}, {"zero": {"k": 8, "nested": [1]}}, ids, QualitySettings(24, (1, 4)), LatencySettings(warmups=0, repeats=1),
        accuracies={("zero", 1): 0.25, ("target", None): 0.75},
    )  # fmt: skip
    assert [(p.label, p.hold_back) for p in points] == [("zero", 1), ("zero, 4 held back", 4), ("source alone", None), ("re-prefill", None)]
    by_label = {p.label: p for p in points}
    assert by_label["zero"].settings == {"k": 8}
    assert by_label["zero"].accuracy == 0.25
    assert by_label["re-prefill"].accuracy == 0.75
    assert by_label["re-prefill"].kl_nats == 0
    assert all(p.cold_seconds is None or p.cold_seconds >= p.warm_seconds for p in points)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (QualitySettings(64, (0,)), "hold_back values 0"),
        (QualitySettings(64, (16, 1)), "increasing"),
        (QualitySettings(64, (64,)), "leaves nothing to transfer of 64"),
        (QualitySettings(500), "do not fit 512 positions"),
    ],
)
def test_what_cannot_be_compared(settings, message):
    with pytest.raises(BadInputError, match=message):
        settings.check(512)
