"""From criteria to a verdict, in words that say what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvbench.runs.verdict import Criterion, Word

Reason = Literal["passed", "refused", "gate", "quality", "source is as good", "nothing to gain", "speed", "open"]


class Decision(NamedTuple):
    """Result of `decide`."""

    verdict: Word
    """The answer."""
    reason: Reason
    """What decided it."""
    sentence: str
    """In words."""


def decide(criteria: Sequence[Criterion], *, complete: bool) -> Decision:
    """The verdict of all criteria.

    do-not-deploy: a required criterion is missed beyond doubt. deploy: all required ones pass and nothing was left out. Else inconclusive.

    Args:
        criteria: all of them.
        complete: whether every stage was reached.
    """
    required = [c for c in criteria if c.required]
    failed = [c for c in required if c.passed is False]
    still_open = [c for c in required if c.passed is None]
    warned = [c for c in criteria if not c.required and c.passed is False]
    caution = f" {len(warned)} warning{'s' if len(warned) > 1 else ''}: {_listed(warned)}." if warned else ""
    if failed:
        reason = _reason(failed)
        lead = {
            "refused": "No cache can go from this source to this target",
            "gate": "The transfer path does not work for these models",
            "nothing to gain": "Nothing to gain",
            "source is as good": "Keep the source model",
            "speed": "Too slow",
            "quality": "Too much is lost",
        }[reason]
        return Decision("do-not-deploy", reason, f"{lead}: {_listed(failed)}.{caution}")
    if not complete or not required or still_open:
        what = _listed(still_open) if still_open else "not every stage was reached"
        rest = len(required) - len(still_open)
        return Decision("inconclusive", "open", f"{rest} of {len(required)} required criteria pass, {len(still_open)} stay open: {what}.{caution}")
    return Decision("deploy", "passed", f"All {len(required)} required criteria pass.{caution}")


def _reason(failed: Sequence[Criterion]) -> Literal["refused", "gate", "quality", "source is as good", "nothing to gain", "speed"]:
    kinds = [c.id.partition(".")[0] for c in failed]
    if "check" in kinds:
        return "refused"
    if "gate" in kinds:
        return "gate"
    if any(kind in ("retention", "text", "canary") for kind in kinds):
        return "quality"
    if "gain" in kinds:
        return "nothing to gain"
    return "source is as good" if "better_than_source" in kinds else "speed"


def _listed(criteria: Sequence[Criterion]) -> str:
    shown = [f"{c.what} ({c.reason})" for c in criteria[:3]]
    return "; ".join(shown) + (f"; and {len(criteria) - 3} more" if len(criteria) > 3 else "")
