"""From a comparison to sentences: one verdict per mapper, with its uncertainty, and what it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from kvbench.reporting.numbers import pair_difference, points_with_interval, ratio_with_interval, score
from kvbench.reporting.view import AverageView, PairView, Policy, ScoreView, Standing, TaskView, VerdictView
from kvbench.stats import Disposition

_GOOD = (Disposition.IMPROVED.value, Disposition.NO_MATERIAL_LOSS.value)


class Judge:
    """Reads the figures of a comparison.

    Args:
        tasks: all tasks.
        scores: all arms on all tasks.
        pairs: all comparisons.
        averages: all averages.
        policy: margins and levels.
        reference: the target's arm.
        source: the source's arm, if any.
        zero: the zero control's arm, if any.
        foreign: whether the arms are runs of plain lm-eval, about which there is nothing to deploy.
    """

    def __init__(
        self,
        tasks: Sequence[TaskView],
        scores: Sequence[ScoreView],
        pairs: Sequence[PairView],
        averages: Sequence[AverageView],
        policy: Policy,
        *,
        reference: str,
        source: str | None,
        zero: str | None,
        foreign: bool,
    ) -> None:
        self.tasks = {task.id: task for task in tasks if task.primary}
        self.scores = {(s.task_id, s.arm): s for s in scores}
        self.pairs = {(p.task_id, p.arm, p.reference): p for p in pairs}
        self.averages = {(a.arm, a.reference): a for a in averages}
        self.policy, self.reference, self.source, self.zero, self.foreign = policy, reference, source, zero, foreign

    def verdict(self, arm: str) -> VerdictView:
        """The verdict on one arm."""
        against = self._pairs(arm, self.reference)
        counts = Counter(pair.disposition for pair in against)
        source, zero = self.standing(arm, self.source), self.standing(arm, self.zero)
        degraded = [pair for pair in against if pair.disposition == Disposition.DEGRADED.value]
        average = self._average_floor(arm)
        fine = all(pair.disposition in _GOOD for pair in against) and average in (None, "kept")
        reading, tone = self._reading(source, zero, bool(degraded) or average == "missed", fine)
        points = [self._target_point(arm, against, degraded)]
        if self.source is not None:
            points.append(self._source_point(arm, source))
        if self.zero is not None:
            points.append(self._zero_point(arm, zero))
        points.extend(self._settling(against))
        return VerdictView(
            arm=arm,
            reading=reading,
            tone=tone,
            sentence=self._sentence(arm, source, zero, degraded, against),
            points=tuple(points),
            against_source=source,
            against_zero=zero,
            counts={word.value: counts.get(word.value, 0) for word in Disposition},
        )

    def standing(self, arm: str, reference: str | None) -> Standing:
        """Whether an arm is better than a reference: by the average difference, else by the tasks one by one."""
        if reference is None or arm == reference:
            return "unknown"
        # A handful of items shows neither that an arm is better nor that it is not.
        if all(pair.n < self.policy.min_n for pair in self._pairs(arm, reference)):
            return "unknown"
        # Whether anything gets through an emptied cache is a question of existence: one task that shows it settles it, in all
        # tests of the report together. An average over tasks near chance would hide a perplexity that fell fiftyfold.
        if reference == self.zero and any(
            (pair.won or 0) > (pair.lost or 0) and pair.p_holm is not None and pair.p_holm < 1 - self.policy.level
            for pair in self._pairs(arm, reference)
        ):
            return "better"
        average = self.averages.get((arm, reference))
        if average is not None and average.difference.lower is not None and average.difference.upper is not None:
            return "better" if average.difference.lower > 0 else "worse" if average.difference.upper < 0 else "not better"
        pairs = [pair for pair in self._pairs(arm, reference) if pair.difference.lower is not None]
        if not pairs:
            return "unknown"
        improved = sum(pair.disposition == Disposition.IMPROVED.value for pair in pairs)
        lost = sum(pair.loss_shown for pair in pairs)
        return "better" if improved and not lost else "worse" if lost and not improved else "not better"

    def _average_floor(self, arm: str) -> Literal["kept", "missed", "open"] | None:
        """Whether the policy's average retention is kept; None where it asks for none."""
        floor, average = self.policy.average_retention, self.averages.get((arm, self.reference))
        if floor is None or average is None:
            return None
        lower, upper = average.retention.lower, average.retention.upper
        if lower is None or upper is None:
            return "open"
        return "kept" if lower >= floor else "missed" if upper < floor else "open"

    def _pairs(self, arm: str, reference: str) -> list[PairView]:
        return [pair for name in self.tasks if (pair := self.pairs.get((name, arm, reference))) is not None]

    def _reading(self, source: Standing, zero: Standing, degraded: bool, fine: bool) -> tuple[str, Literal["good", "bad", "open"]]:
        if self.foreign:
            return ("degraded", "bad") if degraded else ("no material loss", "good") if fine else ("inconclusive", "open")
        if source in ("not better", "worse"):
            return ("do not deploy", "bad") if degraded or source == "worse" else ("keep the source model", "bad")
        if zero in ("not better", "worse"):
            return "do not deploy", "bad"
        if degraded:
            return "do not deploy", "bad"
        return ("supports deploying", "good") if fine and source == "better" else ("inconclusive", "open")

    def _sentence(self, arm: str, source: Standing, zero: Standing, degraded: Sequence[PairView], against: Sequence[PairView]) -> str:
        average = self.averages.get((arm, self.reference))
        level = self.policy.level
        if average is not None and average.retention.value is not None:
            count = len(average.tasks)
            over = f"on average over {count} tasks" if count > 1 else f"on {self.tasks[average.tasks[0]].task}"
            kept = f"{arm} keeps {ratio_with_interval(average.retention, level)} of {self._name(self.reference)}'s score {over}"
        elif against:
            first, task = against[0], self.tasks[against[0].task_id]
            kept = f"{arm} against {self._name(self.reference)} on {task.task}: {pair_difference(task, first, level)}"
        else:
            kept = f"{arm} was not compared with {self._name(self.reference)}"
        parts = [kept]
        if degraded:
            parts.append(f"degraded beyond the margin on {_listed([self.tasks[p.task_id].task for p in degraded])}")
        if source == "not better":
            parts.append("no better than the source model alone")
        elif source == "worse":
            parts.append("worse than simply keeping the source model")
        elif source == "better":
            parts.append("better than the source model alone")
        elif self.source is not None and arm != self.source:
            parts.append("whether it is better than the source model alone is not known from so few items")
        if zero in ("not better", "worse"):
            parts.append("not shown to be better than an empty cache")
        return "; ".join(parts) + "."

    def _target_point(self, arm: str, against: Sequence[PairView], degraded: Sequence[PairView]) -> str:
        counts = Counter(pair.disposition for pair in against)
        words = ", ".join(f"{word.value} on {counts[word.value]}" for word in Disposition if counts[word.value])
        text = f"Against {self._name(self.reference)}, {len(against)} {'task' if len(against) == 1 else 'tasks'}: {words}"
        worst = sorted(degraded, key=lambda pair: pair.difference.value if pair.difference.value is not None else 0.0)
        worst = sorted(worst, key=lambda pair: self.tasks[pair.task_id].kind == "nll")
        if worst:
            text += "; " + "; ".join(self._task_difference(pair) for pair in worst[:3])
        average = self.averages.get((arm, self.reference))
        if average is not None and average.floor_normalised.value is not None:
            text += f". Above chance it keeps {ratio_with_interval(average.floor_normalised, self.policy.level)}"
        return text + "."

    def _task_difference(self, pair: PairView) -> str:
        task = self.tasks[pair.task_id]
        return f"{task.task} {pair_difference(task, pair, self.policy.level)}"

    def _source_point(self, arm: str, standing: Standing) -> str:
        assert self.source is not None
        average = self.averages.get((arm, self.source))
        words = {
            "better": "better than keeping the source model",
            "worse": "worse than keeping the source model",
            "not better": "not shown to be better than keeping the source model",
            "unknown": "whether it beats the source model is not known",
        }[standing]
        text = f"Against {self._name(self.source)}: {words}"
        if average is not None:
            text += f", {points_with_interval(average.difference, self.policy.level)}" + (" on average" if len(average.tasks) > 1 else "")
        for pair in self._pairs(arm, self.source):
            task = self.tasks[pair.task_id]
            if task.kind != "nll":
                continue
            mine, theirs = (self.scores[task.id, who].score.value for who in (arm, self.source))
            better = pair.disposition == Disposition.IMPROVED.value
            word = "better" if better else "worse" if pair.loss_shown else "no different"
            text += f"; perplexity on {task.task} {word} ({score(task, mine)} against {score(task, theirs)})"
            if average is not None and better != (standing == "better") and (better or pair.loss_shown):
                text += ", so accuracy and perplexity disagree"
        return text + "."

    def _zero_point(self, arm: str, standing: Standing) -> str:
        assert self.zero is not None
        average = self.averages.get((arm, self.zero))
        words = {
            "better": "information gets through",
            "worse": "worse than no prefix at all",
            "not better": "it is not shown that anything gets through",
            "unknown": "not known whether anything gets through",
        }[standing]
        return f"Against an empty cache ({self.zero}): {words}" + (
            f", {points_with_interval(average.difference, self.policy.level)}." if average is not None else "."
        )

    def _settling(self, against: Sequence[PairView]) -> list[str]:
        open_pairs = [pair for pair in against if pair.disposition == Disposition.INCONCLUSIVE.value]
        found = []
        for pair in open_pairs[:4]:
            task = self.tasks[pair.task_id]
            why = pair.required_reason or pair.decision_reason
            found.append(f"Inconclusive on {task.task} (n = {pair.n}): {self._task_difference(pair)}; {why}.")
        if len(open_pairs) > 4:
            left = len(open_pairs) - 4
            found.append(f"Inconclusive on {left} more {'task' if left == 1 else 'tasks'}; see the table.")
        return found

    def _name(self, arm: str) -> str:
        if self.foreign:
            return arm
        return "the target" if arm == self.reference else "the source model" if arm == self.source else arm


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:4]) + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
