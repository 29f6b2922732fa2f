"""Which arm is the target, the source, the zero control, and which ones are on trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.errors import BadInputError
from kvbench.reporting.view import Relation
from kvbench.runs.schema import Role
from kvbench.runs.sources import ComparableRun, RunArm


@dataclass(frozen=True)
class Roles:
    """What each arm is to a comparison.

    Attributes:
        order: arms as in tables: target, source, mappers, controls.
        role: by arm.
        mapper: what maps, by arm.
        run: directory, by arm.
        reference: the arm that all are held against.
        source: the arm that is the small model alone, if any.
        zero: the arm with an empty prefix, if any.
        mappers: arms that a verdict is given on.
        foreign: whether no arm is a fitted mapper, so that there is nothing to deploy.
    """

    order: tuple[str, ...]
    role: dict[str, Role]
    mapper: dict[str, str | None]
    run: dict[str, str]
    reference: str
    source: str | None
    zero: str | None
    mappers: tuple[str, ...]
    foreign: bool

    def comparisons(self) -> list[tuple[str, str, Relation, bool]]:
        """(arm, reference, relation, counts for the family) in the order of the tables."""
        found: list[tuple[str, str, Relation, bool]] = []
        for index, arm in enumerate(self.mappers):
            found.append((arm, self.reference, "target", True))
            if self.source:
                found.append((arm, self.source, "source", True))
            if self.zero:
                found.append((arm, self.zero, "zero", True))
            found.extend((arm, other, "mapper", True) for other in self.mappers[index + 1 :])
        context = [arm for arm in self.order if arm not in self.mappers and arm != self.reference]
        found.extend((arm, self.reference, "context", arm == self.source) for arm in context)
        return found


def assign_roles(runs: Sequence[ComparableRun], names: Sequence[str], reference: str | None, source_arm: str | None) -> Roles:
    """Find target, source, zero and mappers among the arms.

    Args:
        runs: all inputs.
        names: arms that are compared.
        reference: arm to be held against; None takes the target, else the first.
        source_arm: arm that stands for the source; None takes the one with that role.

    Raises:
        BadInputError: an unknown arm.
    """
    arms: dict[str, RunArm] = {}
    where: dict[str, str] = {}
    for run in runs:
        for arm in run.arms:
            if arm.name in names and arm.name not in arms:
                arms[arm.name], where[arm.name] = arm, str(run.path)
    for name in (reference, source_arm):
        if name is not None and name not in arms:
            raise BadInputError(f"there is no arm '{name}' in these runs; there are {', '.join(arms)}")
    stated = [name for name, arm in arms.items() if arm.role == "target"]
    held = reference or (stated[0] if stated else next(iter(arms)))
    source = source_arm or next((name for name, arm in arms.items() if arm.role == "source"), None)
    if source == held:
        source = None
    zero = next((name for name, arm in arms.items() if name != held and (arm.role == "control") and "zero" in (arm.mapper, name)), None)
    mappers = [name for name, arm in arms.items() if arm.role in ("mapper", "model") and name not in (held, source)]
    if not mappers:
        # Without a mapper the other arms themselves are the question.
        mappers = [name for name in arms if name not in (held, zero)]
        source = source_arm if source_arm not in mappers else None
    role: dict[str, Role] = {name: arm.role for name, arm in arms.items()}
    role[held] = "target"
    if source:
        role[source] = "source"
    rank = {"target": 0, "source": 1, "mapper": 2, "model": 2, "control": 3}
    order = tuple(sorted(arms, key=lambda name: rank[role[name]]))
    return Roles(
        order, role, {name: arm.mapper for name, arm in arms.items()}, where, held, source, zero, tuple(n for n in order if n in mappers),
        foreign=not any(arm.role == "mapper" for arm in arms.values()),
    )  # fmt: skip


def distinct_names(runs: Sequence[ComparableRun]) -> list[ComparableRun]:
    """Two lm-eval folders of one name get the name of their parent before it."""
    names = [run.arms[0].name for run in runs if run.kind == "lm-eval"]
    result = []
    for run in runs:
        arm = run.arms[0]
        if run.kind == "lm-eval" and names.count(arm.name) > 1:
            parts = run.path.resolve().parts
            depth = next((i for i in range(len(parts) - 1, 0, -1) if parts[i] == arm.name), len(parts) - 1)
            name = "/".join(parts[max(depth - 1, 1) : depth + 1])
            frame = run.frame.assign(arm=name)
            conditions = {(task, name): value for (task, _), value in run.conditions.items()}
            run = replace(run, arms=(RunArm(name, arm.role, arm.mapper, arm.detail),), frame=frame, conditions=conditions)
        result.append(run)
    return result
