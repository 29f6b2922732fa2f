"""The only join of samples: on (task, filter, doc_id), with every hash checked. What does not fit is refused, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import pandas as pd

from kvbench.errors import BadInputError
from kvbench.runs.sources import ComparableRun, Conditions
from kvbench.runs.table import METRIC

_HASHES = {
    "doc_hash": "other documents",
    "target_hash": "other gold answers",
    "prompt_hash": "other prompts",
    "request_hash": "other continuations or generation arguments",
}
_CONDITION_NAMES = {
    "num_fewshot": "number of few-shot examples",
    "limit": "--limit",
    "version": "task version",
    "chat_template": "chat template",
    "system_instruction": "system instruction",
    "generation": "generation arguments",
}
_SHOWN = 3


@dataclass(frozen=True)
class PairedItems:
    """The same items, answered by all arms, in the same order.

    Attributes:
        task: lm-eval task.
        filter: lm-eval filter.
        frames: by arm, indexed by doc_id, all with the same index; an arm that was spared the task has none.
    """

    task: str
    filter: str
    frames: dict[str, pd.DataFrame]

    @property
    def doc_ids(self) -> list[int]:
        """Document numbers, ascending."""
        return [int(doc) for doc in next(iter(self.frames.values())).index]

    @property
    def metrics(self) -> list[str]:
        """Metrics that at least one arm has, in sorted order."""
        names = [str(name) for frame in self.frames.values() for name in frame.columns if str(name).startswith(METRIC)]
        return sorted({name.removeprefix(METRIC) for name in names if any(name in f and f[name].notna().any() for f in self.frames.values())})


def pair(
    runs: Sequence[ComparableRun],
    *,
    tasks: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
    spared: Mapping[str, Collection[str]] | None = None,
) -> list[PairedItems]:
    """Join the samples of runs.

    An arm that several runs share (the target of one pair, scored once per mapper) counts once; where it answered a task twice, both must
    agree to the last digit.

    Args:
        runs: from `load_runs`.
        tasks: compare only these; None for all.
        arms: compare only these; None for all.
        spared: by arm, tasks that it was meant not to answer (a screen's controls do not generate); no other gap is allowed.

    Returns:
        One per task and filter, in the order of the runs.

    Raises:
        BadInputError: an arm misses a task; other items, prompts, gold answers, few-shot counts, limits or settings on one side; a doubled
            item; one name for two arms that answer differently; fewer than two arms.
    """
    known = list(dict.fromkeys(task for run in runs for task in run.tasks))
    chosen = _chosen("task", tasks, known)
    named = _chosen("arm", arms, list(dict.fromkeys(arm.name for run in runs for arm in run.arms)))
    _one_pair(runs)
    if len(named) < 2:
        raise BadInputError(f"there is only one arm ({', '.join(named) or 'none'}): nothing to compare it with; give a second run")
    paired: list[PairedItems] = []
    for task in chosen:
        frames, conditions = {}, {}
        for arm in named:
            if task in (spared or {}).get(arm, ()):
                continue
            frames[arm], conditions[arm] = _of_arm(runs, task, arm)
        _same_conditions(task, conditions, {arm: len(frame) for arm, frame in frames.items()})
        filters = {arm: list(dict.fromkeys(frame["filter"])) for arm, frame in frames.items()}
        first, *others = filters
        for arm in others:
            if set(filters[arm]) != set(filters[first]):
                raise BadInputError(
                    f"task '{task}': arm '{first}' has the filters {', '.join(filters[first])}, arm '{arm}' has {', '.join(filters[arm])}; "
                    "run both with the same task definition"
                )
        paired.extend(PairedItems(task, name, _joined(task, name, frames)) for name in filters[first])
    return paired


def _one_pair(runs: Sequence[ComparableRun]) -> None:
    """Refuse runs of different pairs, whose arms of one name are different models."""
    known = [run for run in runs if run.kind == "kvbench" and run.source and run.target]
    for run in known[1:]:
        for role in ("source", "target"):
            first, other = getattr(known[0], role), getattr(run, role)
            if first != other:
                raise BadInputError(
                    f"'{known[0].path}' has the {role} '{first}' and '{run.path}' has '{other}': runs of two pairs share no arms; "
                    "write one report for each, or ask `kvbench correlate` what they have in common"
                )


def _chosen(kind: str, asked: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    if asked is None:
        return list(known)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise BadInputError(f"there is no {kind} '{unknown[0]}' in these runs; there are {', '.join(known)}")
    return [name for name in known if name in asked]


def _of_arm(runs: Sequence[ComparableRun], task: str, arm: str) -> tuple[pd.DataFrame, Conditions]:
    found: list[tuple[ComparableRun, pd.DataFrame]] = []
    for run in runs:
        rows = run.frame[(run.frame["task"] == task) & (run.frame["arm"] == arm)]
        if len(rows):
            found.append((run, rows))
    if not found:
        holders = [str(run.path) for run in runs if any(a.name == arm for a in run.arms)]
        raise BadInputError(
            f"arm '{arm}' has no samples of task '{task}' (looked in {', '.join(holders)}): the comparison would be incomplete; "
            "finish that run with its own command, or restrict the report with --tasks or --arms"
        )
    for run, rows in found:
        doubled = rows[rows.duplicated(["filter", "doc_id"])]
        if len(doubled):
            raise BadInputError(f"task '{task}', arm '{arm}': item {int(doubled['doc_id'].iloc[0])} comes twice in '{run.path}'; repeat that run")
    run, rows = found[0]
    for other, again in found[1:]:
        _same_answers(task, arm, (run, rows), (other, again))
    return rows, run.conditions.get((task, arm), Conditions())


def _same_answers(task: str, arm: str, first: tuple[ComparableRun, pd.DataFrame], second: tuple[ComparableRun, pd.DataFrame]) -> None:
    columns = sorted({str(c) for _, rows in (first, second) for c in rows.columns if str(c).startswith(METRIC)})
    left, right = (rows.set_index(["filter", "doc_id"]).sort_index().reindex(columns=columns) for _, rows in (first, second))
    if left.index.equals(right.index) and left.astype(float).equals(right.astype(float)):
        return
    raise BadInputError(
        f"arm '{arm}' answers task '{task}' differently in '{first[0].path}' and '{second[0].path}'; "
        "runs of other models, dtypes or items need reports of their own (or rename the folder of an lm-eval run)"
    )


def _same_conditions(task: str, conditions: dict[str, Conditions], rows: dict[str, int]) -> None:
    first, *others = conditions
    for arm in others:
        for field in fields(Conditions):
            mine, theirs = getattr(conditions[first], field.name), getattr(conditions[arm], field.name)
            if mine == theirs:
                continue
            # A limit that cuts nothing is harmless; an unknown few-shot count is no condition.
            if rows[arm] != rows[first] if field.name == "limit" else mine is not None and theirs is not None:
                raise BadInputError(
                    f"task '{task}': {_CONDITION_NAMES[field.name]} is {_said(mine)} for arm '{first}' ({rows[first]} rows) and "
                    f"{_said(theirs)} for arm '{arm}' ({rows[arm]} rows); score both under the same conditions"
                )


def _joined(task: str, name: str, frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    by_arm = {arm: frame[frame["filter"] == name].set_index("doc_id").sort_index() for arm, frame in frames.items()}
    first, *others = by_arm
    for arm in others:
        mine, theirs = by_arm[first], by_arm[arm]
        for lacking, owner, missing in ((arm, first, mine.index.difference(theirs.index)), (first, arm, theirs.index.difference(mine.index))):
            if len(missing):
                raise BadInputError(
                    f"task '{task}' (filter {name}): arm '{lacking}' lacks {len(missing)} of the {len(by_arm[owner])} items of arm '{owner}' "
                    f"(doc_id {_examples(missing)}); an incomplete comparison is refused, score the same items"
                )
        for column, what in _HASHES.items():
            differs = mine.index[mine[column] != theirs[column]]
            if len(differs):
                raise BadInputError(
                    f"task '{task}' (filter {name}): arms '{first}' and '{arm}' were given {what} on {len(differs)} of {len(mine)} items "
                    f"(doc_id {_examples(differs)}; {column}); they can only be compared on identical items"
                )
    return by_arm


def _examples(ids: pd.Index) -> str:
    return ", ".join(str(doc) for doc in ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")


def _said(value: object) -> str:
    if value is None or value == "":
        return "none"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
