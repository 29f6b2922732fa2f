"""Who holds which cache at which turn: the models alone, and the three protocols of a multi-turn handoff."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.errors import BadInputError
from kvbench.kv.content import RotatedKV
from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel
from kvbench.scoring.arms import Answering
from kvbench.scoring.batching import Tokens
from kvbench.scoring.engine import Costs
from kvbench.scoring.handoff_caches import extended, mapped

PROTOCOLS = ("per_turn", "once", "alternate")


@dataclass(frozen=True)
class Turn:
    """What a batch of conversations has come to.

    Attributes:
        number: 1 is the first question.
        prefixes: all context tokens of each conversation but the held-back ones.
        asked_at: for each, where the question of this turn begins.
    """

    number: int
    prefixes: Sequence[Tokens]
    asked_at: Sequence[int]


class OwnCache:
    """A model's cache of what it has run itself."""

    def __init__(self, role: Answering, model: LoadedModel, costs: Costs) -> None:
        self.role, self.model, self._costs = role, model, costs
        self.kv: RotatedKV | None = None

    def advance(self, prefixes: Sequence[Tokens]) -> RotatedKV:
        """Run what is new, and return the cache of all."""
        done = 0 if self.kv is None else int(self.kv.lengths[: len(prefixes)].sum())
        self._costs.prefilled[self.role] += sum(map(len, prefixes)) - done
        self.kv = extended(self.model, self.kv, prefixes)
        return self.kv


class Protocol(ABC):
    """One way to carry a conversation.

    Attributes:
        name: `per_turn`, `once`, `alternate`, or `target`, `source` for a model alone.
        arm: mapper by name, or the model alone.
    """

    def __init__(self, name: str, arm: str) -> None:
        self.name, self.arm = name, arm

    @abstractmethod
    def answers(self, turn: int) -> Answering:
        """Who answers at this turn."""

    @abstractmethod
    def cache(self, turn: Turn) -> RotatedKV:
        """The cache of `turn.prefixes` that the answering model starts from; turns come in order."""


class Alone(Protocol):
    """One model from its own cache throughout."""

    def __init__(self, own: OwnCache) -> None:
        super().__init__(own.role, own.role)
        self._own = own

    def answers(self, turn: int) -> Answering:
        """The model itself."""
        return self._own.role

    def cache(self, turn: Turn) -> RotatedKV:
        """Its own."""
        return self._own.advance(turn.prefixes)


class PerTurn(Protocol):
    """The source runs the whole history, all of it is mapped, the target answers and forgets."""

    def __init__(self, arm: str, mapper: Mapper, source: OwnCache, target: LoadedModel, costs: Costs) -> None:
        super().__init__("per_turn", arm)
        self._mapper, self._source, self._target, self._costs = mapper, source, target, costs
        self._mapped: RotatedKV | None = None

    def answers(self, turn: int) -> Answering:
        """The target."""
        return "target"

    def cache(self, turn: Turn) -> RotatedKV:
        """The source's cache, mapped. The mapping goes token by token, so old tokens are not mapped again."""
        own = self._source.advance(turn.prefixes)
        self._mapped = mapped(self._mapper, own, self._source.model, self._target, self._costs, behind=self._mapped)
        return self._mapped


class Once(Protocol):
    """The source carries the conversation up to a turn; there its cache is mapped, and the target goes on from it alone."""

    def __init__(self, arm: str, mapper: Mapper, source: OwnCache, target: LoadedModel, costs: Costs, handoff_turn: int) -> None:
        super().__init__("once", arm)
        self._mapper, self._source, self._costs, self._handoff = mapper, source, costs, handoff_turn
        self._own = OwnCache("target", target, costs)

    def answers(self, turn: int) -> Answering:
        """The source before the handoff, the target from there on."""
        return "source" if turn < self._handoff else "target"

    def cache(self, turn: Turn) -> RotatedKV:
        """The source's own, then the mapped one with the target's own tokens behind it."""
        if turn.number < self._handoff:
            return self._source.advance(turn.prefixes)
        if turn.number == self._handoff:
            own = self._source.advance(turn.prefixes)
            self._own.kv = mapped(self._mapper, own, self._source.model, self._own.model, self._costs)
            return self._own.kv
        return self._own.advance(turn.prefixes)


class Alternate(Protocol):
    """Source (odd turns) and target (even turns) answer in turns.

    Each runs the question it is asked and its own answer behind the cache that it was handed, and hands over the whole.
    """

    def __init__(self, arm: str, there: Mapper, back: Mapper, models: Mapping[Answering, LoadedModel], costs: Costs) -> None:
        super().__init__("alternate", arm)
        self._mappers: dict[Answering, Mapper] = {"target": there, "source": back}
        self._models, self._costs = models, costs
        self._own = OwnCache("source", models["source"], costs)

    def answers(self, turn: int) -> Answering:
        """The source first."""
        return "source" if turn % 2 else "target"

    def cache(self, turn: Turn) -> RotatedKV:
        """The whole cache of the other, mapped, with the question behind it."""
        role = self.answers(turn.number)
        if turn.number > 1:
            handed = self._own.advance([prefix[:end] for prefix, end in zip(turn.prefixes, turn.asked_at, strict=True)])
            received = OwnCache(role, self._models[role], self._costs)
            received.kv = mapped(self._mappers[role], handed, self._own.model, received.model, self._costs)
            self._own = received
        return self._own.advance(turn.prefixes)


@dataclass(frozen=True)
class HandoffMapper:
    """A mapper by name, with its way back for the protocol `alternate`."""

    name: str
    there: Mapper
    back: Mapper | None = None


def protocols(
    names: Sequence[str],
    mappers: Sequence[HandoffMapper],
    models: Mapping[Answering, LoadedModel],
    costs: Costs,
    *,
    handoff_turn: int,
    shared_history: bool,
) -> list[Protocol]:
    """The two models alone, and every protocol with every mapper, at the start of a conversation.

    Args:
        names: of `PROTOCOLS`.
        mappers: to compare.
        models: source and target.
        costs: counts tokens.
        handoff_turn: of the protocol `once`.
        shared_history: whether all see the same history, so that the source runs it once for all of them.

    Raises:
        BadInputError: an unknown protocol, or `alternate` without a way back.
    """
    shared = OwnCache("source", models["source"], costs)
    source: Callable[[], OwnCache] = (lambda: shared) if shared_history else (lambda: OwnCache("source", models["source"], costs))
    found: list[Protocol] = [Alone(OwnCache("target", models["target"], costs)), Alone(source())]
    for name in names:
        for mapper in mappers:
            if name == "per_turn":
                found.append(PerTurn(mapper.name, mapper.there, source(), models["target"], costs))
            elif name == "once":
                found.append(Once(mapper.name, mapper.there, source(), models["target"], costs, handoff_turn))
            elif name == "alternate":
                if mapper.back is None:
                    raise BadInputError(f"protocol 'alternate' needs a mapper from target to source for '{mapper.name}'; give one with --back-mapper")
                found.append(Alternate(mapper.name, mapper.there, mapper.back, models, costs))
            else:
                raise BadInputError(f"unknown protocol '{name}'; use {', '.join(PROTOCOLS)}")
    return found
