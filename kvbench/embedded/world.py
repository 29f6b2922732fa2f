"""The small world that the embedded models memorise: who there is, what is true of them, and how it is said.

Nothing here is random at import: every choice follows from `WORLD_SEED`, so the facts are the same in every process.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

WORLD_SEED = 20260
ENTITY_COUNT = 240
OPERAND_LIMIT = 20
HELD_OUT_SUMS = 120

_ONSETS = ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z")
_MIDDLES = ("b", "d", "g", "k", "l", "m", "n", "r", "s", "t", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u")


@dataclass(frozen=True)
class Attribute:
    """One property every entity has.

    Attributes:
        name: The word for the property.
        values: The closed set of answers, each one token.
        statements: Ways to state a fact; `{n}` stands for the entity, `{v}` for the value.
        questions: Ways to ask for it. One of them is held out per fact, see `held_out_phrasing`.
    """

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "colour",
        ("red", "blue", "green", "white", "black", "brown", "grey", "pink"),
        ("{n} is {v}.", "The colour of {n} is {v}.", "{n} wears {v}.", "You see {n} in {v}."),
        ("What is the colour of {n}?", "Which colour does {n} wear?", "What colour is {n}?", "Name the colour of {n}."),
    ),
    Attribute(
        "town",
        ("Oslo", "Lima", "Rome", "Cairo", "Delhi", "Paris", "Tokyo", "Quito"),
        ("{n} lives in {v}.", "The town of {n} is {v}.", "{n} has a house in {v}.", "You meet {n} in {v}."),
        ("Where does {n} live?", "What is the town of {n}?", "In which town is {n}?", "Name the town of {n}."),
    ),
    Attribute(
        "food",
        ("bread", "rice", "soup", "cake", "fish", "corn", "cheese", "plums"),
        ("{n} eats {v}.", "The food of {n} is {v}.", "{n} has {v} for lunch.", "You give {n} some {v}."),
        ("What does {n} eat?", "What is the food of {n}?", "Which food does {n} like?", "Name the food of {n}."),
    ),
    Attribute(
        "work",
        ("baker", "tailor", "sailor", "farmer", "miner", "singer", "doctor", "painter"),
        ("{n} is a {v}.", "The work of {n} is {v}.", "{n} works as a {v}.", "You know {n} as a {v}."),
        ("What work does {n} do?", "What is the work of {n}?", "Which work is it that {n} does?", "Name the work of {n}."),
    ),
    Attribute(
        "pet",
        ("dog", "cat", "horse", "goat", "duck", "rabbit", "snake", "crow"),
        ("{n} has a {v}.", "The pet of {n} is a {v}.", "{n} walks with a {v}.", "You see {n} with a {v}."),
        ("What pet does {n} have?", "What is the pet of {n}?", "Which pet is with {n}?", "Name the pet of {n}."),
    ),
)

OPENINGS: tuple[str, ...] = (
    "{n} went to the market.",
    "{n} woke up early.",
    "One day {n} was at home.",
    "This is about {n}.",
)
MEETINGS: tuple[str, ...] = (
    "{n} met {m} at the market.",
    "{n} and {m} were at home.",
    "One day {n} went out with {m}.",
    "This is about {n} and {m}.",
)


@dataclass(frozen=True)
class Fact:
    """One true thing: attribute number `attribute` of entity number `entity`."""

    entity: int
    attribute: int

    @property
    def value(self) -> str:
        """The word that answers a question about this fact."""
        return ATTRIBUTES[self.attribute].values[_value_table()[self.entity][self.attribute]]

    @property
    def held_out_phrasing(self) -> int:
        """The question phrasing that training never uses for this fact, and evaluation always does."""
        return (7 * self.entity + 3 * self.attribute) % len(ATTRIBUTES[self.attribute].questions)

    def statement(self, phrasing: int, name: str | None = None) -> str:
        """The fact as a sentence, about `name` (a pronoun, say) instead of the entity's own name if given."""
        text = ATTRIBUTES[self.attribute].statements[phrasing].format(n=name or entities()[self.entity], v=self.value)
        return text[0].upper() + text[1:]

    def question(self, phrasing: int) -> str:
        """The question that asks for the fact in one of its phrasings."""
        return ATTRIBUTES[self.attribute].questions[phrasing].format(n=entities()[self.entity])

    def training_question(self, rng: random.Random) -> str:
        """The question in a phrasing drawn from those that training may use."""
        phrasings = [p for p in range(len(ATTRIBUTES[self.attribute].questions)) if p != self.held_out_phrasing]
        return self.question(rng.choice(phrasings))


@cache
def entities() -> tuple[str, ...]:
    """The names of the entities, each one capitalised token, in the order of their numbers."""
    rng = random.Random(WORLD_SEED)
    taken = {value for attribute in ATTRIBUTES for value in attribute.values}
    names: list[str] = []
    while len(names) < ENTITY_COUNT:
        name = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_MIDDLES) + rng.choice(_VOWELS)
        if name not in taken:
            taken.add(name)
            names.append(name)
    return tuple(names)


@cache
def _value_table() -> tuple[tuple[int, ...], ...]:
    """Value numbers `[entity][attribute]`; every value of an attribute belongs to equally many entities."""
    rng = random.Random(WORLD_SEED + 1)
    columns: list[list[int]] = []
    for attribute in ATTRIBUTES:
        column = [i % len(attribute.values) for i in range(ENTITY_COUNT)]
        rng.shuffle(column)
        columns.append(column)
    return tuple(tuple(column[i] for column in columns) for i in range(ENTITY_COUNT))


@cache
def facts() -> tuple[Fact, ...]:
    """Every fact of the world, entity by entity."""
    return tuple(Fact(entity, attribute) for entity in range(ENTITY_COUNT) for attribute in range(len(ATTRIBUTES)))


@cache
def sums() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """All pairs of operands below `OPERAND_LIMIT`, as (training pairs, held-out pairs)."""
    pairs = [(a, b) for a in range(OPERAND_LIMIT) for b in range(OPERAND_LIMIT)]
    random.Random(WORLD_SEED + 2).shuffle(pairs)
    return tuple(pairs[HELD_OUT_SUMS:]), tuple(pairs[:HELD_OUT_SUMS])


def turn(question: str, answer: str) -> str:
    """A question with its answer, in the form that every task of the family uses."""
    return f"{prompt(question)} {answer}"


def prompt(question: str) -> str:
    """A question that waits for its answer; the answer follows after one space."""
    return f"Question: {question}\nAnswer:"


def sum_question(a: int, b: int) -> str:
    """The question for a sum."""
    return f"What is {a} plus {b}?"
