"""Trained mappers: the seed decides every bit, an interrupted fit goes on to the same bits, progress is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_pairs import GEOMETRIES, TinyPair, tiny_pair

from kvbench.errors import BadInputError
from kvbench.mappers.base import Mapper, Recipe
from kvbench.mappers.mlp import MLP
from kvbench.mappers.residual import Residual
from kvbench.mappers.residual_training import draw_split, one_cycle
from kvbench.mappers.training import report_to_stderr

RECIPES: list[Recipe] = [
    MLP(k=2, widths=(8, 8), epochs=2, batch_rows=50, batch_size=4),
    Residual(k=2, lambda_=10.0, bottleneck=8, epochs=3, inner_steps=2, batch_size=2, evaluations=9),
]


class StopFitError(Exception):
    pass


@pytest.fixture
def pair(tmp_path: Path) -> TinyPair:
    return tiny_pair(tmp_path / "moments", GEOMETRIES[1])


def same(a: Mapper, b: Mapper) -> bool:
    first, second = dict(a.tensors()), dict(b.tensors())
    return sorted(first) == sorted(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.method)
def test_the_seed_decides_every_bit(recipe: Recipe, pair: TinyPair) -> None:
    models = (pair.source, pair.target)
    first, again = recipe.fit(pair.calibration, models=models), recipe.fit(pair.calibration, models=models)
    assert same(first, again)
    other = dataclasses.replace(recipe, seed=1)  # type: ignore[call-arg]
    assert not same(first, other.fit(pair.calibration, models=models))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.method)
@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_an_interrupted_fit_goes_on_to_the_same_bits(recipe: Recipe, stop_at: int, pair: TinyPair, tmp_path: Path) -> None:
    models = (pair.source, pair.target)
    whole = recipe.fit(pair.calibration, models=models)

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("training") and done == stop_at:
            raise StopFitError

    with pytest.raises(StopFitError):
        recipe.fit(pair.calibration, models=models, progress=stop, checkpoint=tmp_path / "checkpoint")
    seen: list[int] = []
    resumed = recipe.fit(pair.calibration, models=models, progress=lambda what, done, total: seen.append(done), checkpoint=tmp_path / "checkpoint")
    assert same(whole, resumed)
    assert whole.describe()["r2_k_heldout"] == resumed.describe()["r2_k_heldout"]


def test_finished_layers_of_an_mlp_are_not_trained_again(pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[0]
    first = recipe.fit(pair.calibration, models=(pair.source, pair.target), checkpoint=tmp_path / "checkpoint")

    def never(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(MLP, "train", never)
    monkeypatch.setattr("kvbench.mappers.training.run_pair", never)
    assert same(first, recipe.fit(pair.calibration, models=(pair.source, pair.target), checkpoint=tmp_path / "checkpoint"))


def test_a_checkpoint_of_another_fit_is_refused(pair: TinyPair, tmp_path: Path) -> None:
    models = (pair.source, pair.target)
    RECIPES[0].fit(pair.calibration, models=models, checkpoint=tmp_path / "checkpoint")
    other = MLP(k=2, widths=(8, 9), epochs=2, batch_rows=50, batch_size=4)
    with pytest.raises(BadInputError, match="checkpoint' holds a fit with another recipe, calibration or number of threads; delete it or choose"):
        other.fit(pair.calibration, models=models, checkpoint=tmp_path / "checkpoint")


def test_a_residual_that_helps_nowhere_is_the_closed_form(pair: TinyPair) -> None:
    """A learning rate that only harms: every layer keeps its start, whose last matrix is zero."""
    recipe = Residual(k=2, lambda_=10.0, bottleneck=8, epochs=4, inner_steps=1, batch_size=2, learning_rate=1e4, evaluations=4, patience=2)
    mapper = recipe.fit(pair.calibration, models=(pair.source, pair.target))
    details = mapper.describe()
    assert details["attention_error"] == details["attention_error_closed_form"]
    assert details["steps"] < 4 * 3, "stopped early"
    for name, tensor in mapper.tensors():
        if name.endswith((".U2", ".u2")):
            assert not bool(tensor.any())
    assert details["r2_k_heldout"] == pytest.approx(details["r2_k_heldout_closed_form"], abs=1e-4)


def test_schedule_and_splits_come_from_the_step_alone() -> None:
    rates = [one_cycle(step, 100, 1.0) for step in range(100)]
    assert max(rates) == rates[29] == rates[30] == 1.0
    assert rates[0] == pytest.approx(1 / 30)
    assert rates[-1] < 0.01
    a, b = draw_split(3, 17, 40, 8), draw_split(3, 17, 40, 8)
    assert a.at == b.at
    assert torch.equal(a.queries, b.queries)
    assert 10 <= a.at < 30
    assert bool((a.queries >= a.at).all())
    assert len(draw_split(0, 0, 4, 8).queries) >= 1


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for done in range(1, 21):
        report_to_stderr("training layers", done, 20)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"training layers {done}/20" for done in range(2, 21, 2)]
