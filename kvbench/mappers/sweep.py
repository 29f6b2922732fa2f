"""Many settings of one recipe fitted from stored moments, scored out of sample, and one of them chosen.

Every fit reads the moments that are in memory already; only a criterion or a recipe that asks for it runs a model. One Cholesky factor
serves all target layers that share their source layers. An eigendecomposition would serve all lambdas at once, but costs about thirty
times a Cholesky factorisation of the same matrix, so it would pay only from dozens of lambdas on.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.calibration.moments import Calibration, CrossMoments
from kvbench.calibration.sequences import load_tokens
from kvbench.errors import BadInputError
from kvbench.mappers.base import Mapper, Progress, Recipe
from kvbench.mappers.linear import RESIDENT_BYTES
from kvbench.mappers.recipes import ALIASES

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel

CALIBRATION = "calibration"
ROWS = "rows"
RESERVED = (CALIBRATION, ROWS)
"""Axes that are calibrations, not settings of the recipe."""
MAPPERS_AT_ONCE = 8

Judge = Callable[[Sequence[Mapper]], list[dict[str, float]]]
"""Scores of some mappers, each by the name of the figure; the first figure decides, more is better."""


def parse_grid(axes: Sequence[str]) -> dict[str, list[str]]:
    """`["k=1,2,all", "lambda=0.01,1"]` as axis -> values, in that order.

    Values are separated by commas, or by `|` where a value holds commas itself (a fixed list of source layers).

    Raises:
        BadInputError: not `name=values`, an axis named twice, no or repeated values.
    """
    grid: dict[str, list[str]] = {}
    for axis in axes:
        name, separator, text = axis.partition("=")
        name = name.strip()
        values = [value.strip() for value in text.split("|" if "|" in text else ",")]
        if not separator or not name or not all(values):
            raise BadInputError(f"--grid {axis} is not of the form name=value,value,... (separate values that hold commas by '|')")
        if name in grid or name in RESERVED:
            raise BadInputError(f"--grid {axis}: '{name}' is {'given twice' if name in grid else 'no setting; give several MOMENTS or --sequences'}")
        if len(set(values)) != len(values):
            raise BadInputError(f"--grid {axis} names a value twice")
        grid[name] = values
    return grid


def number(name: str, value: str, candidates: int) -> float | None:
    """A swept value as a number, `k=all` as the number of candidate layers; None where it is none."""
    if (name, value) == ("k", "all"):
        return float(candidates)
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


@dataclass(frozen=True)
class Data:
    """One calibration of a sweep.

    Attributes:
        label: its data.
        calibration: its moments.
    """

    label: str
    calibration: Calibration

    @property
    def rows(self) -> int:
        """Rows of the fit part."""
        return int(self.calibration.manifest["data"]["rows"])


class JudgedOn(Calibration):
    """Fits on one calibration, judges (and chooses source layers) on the held-out part of another, so that all texts and sizes face the same rows.

    Args:
        fit: what is fitted on.
        judged: whose held-out moments count.

    Raises:
        BadInputError: of different models or candidate layers.
    """

    def __init__(self, fit: Calibration, judged: Calibration) -> None:
        super().__init__(fit.path)
        for what in ("source", "target"):
            mine, other = (c.manifest[what]["weights_fingerprint"] for c in (fit, judged))
            if mine != other:
                raise BadInputError(
                    f"'{fit.path}' and '{judged.path}' were calibrated with different {what} weights ({mine[:12]} and {other[:12]}); sweep one pair at a time"
                )
        if fit.source_layers != judged.source_layers:
            raise BadInputError(f"'{fit.path}' and '{judged.path}' hold different candidate source layers; calibrate both with the same ones")
        self._judged = judged
        # The fit part is shared with the calibration that was given, not read again.
        self._kept = fit._kept

    def moments(self, part: str, kind: str) -> CrossMoments:
        """Moments of the fit part of one, of the held-out part of the other."""
        return self._judged.moments(part, kind) if part == "heldout" else super().moments(part, kind)


@dataclass
class Trial:
    """One point of the grid.

    Attributes:
        settings: swept settings, as given, and the calibration where there are several.
        values: the same as numbers, where they are numbers (`all` is the number of candidate layers).
        calibration: its label.
        recipe: the whole configuration; None where the settings are refused.
        r2_k: held-out R2 of keys, mean over target layers.
        r2_v: the same of values.
        parameters: entries of all matrices.
        seconds: of the fit.
        scores: by figure; the first decides.
        failure: why there are no figures.
        chosen: the best one.
    """

    settings: dict[str, str]
    values: dict[str, float] = field(default_factory=dict)
    calibration: str = ""
    recipe: dict[str, Any] | None = None
    r2_k: float | None = None
    r2_v: float | None = None
    parameters: int | None = None
    seconds: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    chosen: bool = False

    @property
    def score(self) -> float | None:
        """What decides."""
        return next(iter(self.scores.values()), None)


def sweep(
    base: Recipe,
    grid: Mapping[str, Sequence[str]],
    data: Sequence[Data],
    *,
    judge: Judge | None = None,
    models: tuple[LoadedModel, LoadedModel] | None = None,
    progress: Progress | None = None,
) -> list[Trial]:
    """Fit and score every point of a grid, then mark the best.

    Args:
        base: what is the same everywhere.
        grid: axis -> values.
        data: calibrations; all are judged on the held-out part of the first.
        judge: scores mappers that models run with; None takes the mean of held-out K and V R2.
        models: both models, for recipes that train.
        progress: told how many points are done.

    Returns:
        All points in grid order, those that could not be fitted with the reason.

    Raises:
        BadInputError: no point could be fitted, or several calibrations for a recipe that trains on one's sequences.
    """
    used = _same_heldout(type(base), data)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    jobs = [(which, point) for which in range(len(data)) for point in points]
    trials: list[Trial] = []
    waiting: list[tuple[Trial, Mapper]] = []
    for done, (which, point) in enumerate(jobs, 1):
        trial, mapper = _fit(base, point, data[which], used[which], models, len(data) > 1)
        trials.append(trial)
        if mapper is not None and judge is not None:
            waiting.append((trial, mapper))
        del mapper  # the next one is fitted without it in memory
        # Mappers judged together share every prefill, but only as many as fit comfortably into memory.
        if len(waiting) == MAPPERS_AT_ONCE or sum(4 * m.parameters() for _, m in waiting) > RESIDENT_BYTES or done == len(jobs):
            _judge(waiting, judge)
            waiting = []
        if progress:
            progress("settings", done, len(jobs))
    choose(trials)
    return trials


def varied(base: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with some settings changed.

    Raises:
        BadInputError: a setting it does not have, or a value of the wrong type.
    """
    same = {name: value for name, value in base.configuration().items() if name != "method"}
    return type(base).from_settings({**same, **{ALIASES.get(name, name): value for name, value in settings.items()}})


def _same_heldout(kind: type[Recipe], data: Sequence[Data]) -> list[Calibration]:
    first = data[0].calibration
    if not kind.needs_models:
        return [first, *(JudgedOn(d.calibration, first) for d in data[1:])]
    # A recipe that runs the models judges on the held-out sequences of its own calibration, so those must be the same ones.
    for other in data[1:]:
        if not np.array_equal(load_tokens(other.calibration).heldout, load_tokens(first).heldout):
            raise BadInputError(
                f"recipe '{kind.method}' judges on the held-out sequences of its own calibration, and those of '{first.path}' and "
                f"'{other.calibration.path}' differ; sweep each MOMENTS on its own and compare the results with 'kvbench evaluate'"
            )
    return [d.calibration for d in data]


def _fit(
    base: Recipe,
    settings: dict[str, str],
    data: Data,
    calibration: Calibration,
    models: tuple[LoadedModel, LoadedModel] | None,
    several: bool,
) -> tuple[Trial, Mapper | None]:
    numbers = {name: number(name, value, len(calibration.source_layers)) for name, value in settings.items()}
    trial = Trial(dict(settings), {name: value for name, value in numbers.items() if value is not None}, data.label)
    if several:
        trial.settings.update({CALIBRATION: data.label, ROWS: str(data.rows)})
        trial.values[ROWS] = float(data.rows)
    started = time.perf_counter()
    try:
        recipe = varied(base, settings)
        trial.recipe = recipe.configuration()
        mapper = recipe.fit(calibration, models=models)
    except BadInputError as error:
        trial.failure = str(error)
        return trial, None
    trial.seconds, trial.parameters = round(time.perf_counter() - started, 3), mapper.parameters()
    figures = mapper.describe()
    trial.r2_k, trial.r2_v = (_mean(figures.get(f"r2_{name}_heldout")) for name in ("k", "v"))
    if trial.r2_k is not None and trial.r2_v is not None:
        trial.scores["held-out R2"] = (trial.r2_k + trial.r2_v) / 2
    return trial, mapper


def _judge(waiting: Sequence[tuple[Trial, Mapper]], judge: Judge | None) -> None:
    if judge is None or not waiting:
        return
    for (trial, _), scores in zip(waiting, judge([mapper for _, mapper in waiting]), strict=True):
        trial.scores = {**scores, **trial.scores}


def choose(trials: Sequence[Trial]) -> Trial:
    """Mark and return the best point; of equals the smaller mapper, then the first.

    Raises:
        BadInputError: no point has a score.
    """
    scored = [t for t in trials if t.score is not None and math.isfinite(t.score)]
    if not scored:
        raise BadInputError(f"no setting could be fitted and scored; the first: {next((t.failure for t in trials if t.failure), 'it has no figure')}")
    best = min(scored, key=lambda t: (-(t.score or 0.0), t.parameters or 0))
    best.chosen = True
    return best


@dataclass(frozen=True)
class Fold:
    """The choice without one task, and what it costs on that task.

    Attributes:
        task: left out.
        settings: what the others choose.
        score: of that choice on the task left out.
        score_of_choice: of what all tasks together choose, on the same task.
        moved: whether the choice is another one.
    """

    task: str
    settings: dict[str, str]
    score: float
    score_of_choice: float
    moved: bool


def leave_one_out(trials: Sequence[Trial], tasks: Sequence[str]) -> list[Fold]:
    """Choose again without each task (arXiv:2608.03893, appendix H).

    Args:
        trials: with a score per task.
        tasks: names of those scores.

    Raises:
        BadInputError: fewer than two tasks.
    """
    if len(tasks) < 2:
        raise BadInputError(f"leaving one task out needs two or more choosing tasks, not {len(tasks)}")
    scored = [t for t in trials if all(task in t.scores for task in tasks)]

    def best(of: Sequence[str]) -> Trial:
        return min(scored, key=lambda t: (-sum(t.scores[task] for task in of) / len(of), t.parameters or 0))

    whole = best(tasks)
    folds = []
    for left_out in tasks:
        again = best([task for task in tasks if task != left_out])
        folds.append(Fold(left_out, again.settings, again.scores[left_out], whole.scores[left_out], again is not whole))
    return folds


def check_prefix(prefix: int, tokens: int) -> None:
    """Refuse a prefix that leaves nothing to compare.

    Raises:
        BadInputError: outside 1 to tokens - 1.
    """
    if not 1 <= prefix < tokens:
        raise BadInputError(f"prefix of {prefix} tokens, but the held-out sequences have {tokens}; use 1 to {tokens - 1}")


def _mean(values: Sequence[float | None] | None) -> float | None:
    known = [value for value in values or [] if value is not None]
    return sum(known) / len(known) if known else None
