"""Documents of the small world: the training stream of the embedded models, and texts to calibrate a pair on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from kvbench.embedded.world import ATTRIBUTES, ENTITY_COUNT, MEETINGS, OPENINGS, Fact, entities, facts, sum_question, sums, turn


def _random_fact(rng: random.Random) -> Fact:
    return rng.choice(facts())


def story_opening(rng: random.Random, cast: list[int], statements: int) -> tuple[str, list[Fact]]:
    """The narrative part of a story.

    Args:
        rng: Source of every choice.
        cast: Entity numbers, one or two.
        statements: How many facts of the cast it tells.

    Returns:
        The text, and the facts that it has not told, in random order.
    """
    names = [entities()[i] for i in cast]
    sentences = [rng.choice(OPENINGS).format(n=names[0]) if len(cast) == 1 else rng.choice(MEETINGS).format(n=names[0], m=names[1])]
    told = [Fact(i, a) for i in cast for a in range(len(ATTRIBUTES))]
    rng.shuffle(told)
    for fact in told[:statements]:
        pronoun = "it" if len(cast) == 1 and rng.random() < 0.3 else None
        sentences.append(fact.statement(rng.randrange(4), pronoun))
    return " ".join(sentences), told[statements:]


def _fact_document(rng: random.Random) -> str:
    return " ".join(_random_fact(rng).statement(rng.randrange(4)) for _ in range(rng.randint(1, 8)))


def _profile_document(rng: random.Random) -> str:
    cast = rng.sample(range(ENTITY_COUNT), rng.choice((1, 2, 2)))
    text, _ = story_opening(rng, cast, rng.randint(3, 5 * len(cast)))
    return text


def _question_document(rng: random.Random) -> str:
    chosen = [_random_fact(rng) for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.3:  # few-shot prompts often stay with one kind of question
        chosen = [Fact(fact.entity, chosen[0].attribute) for fact in chosen]
    return rng.choice(("\n", "\n\n")).join(turn(fact.training_question(rng), fact.value) for fact in chosen)


def _sum_document(rng: random.Random) -> str:
    chosen = [rng.choice(sums()[0]) for _ in range(rng.randint(1, 6))]
    if rng.random() < 0.3:
        return " ".join(f"{a} plus {b} is {a + b}." for a, b in chosen)
    return rng.choice(("\n", "\n\n")).join(turn(sum_question(a, b), str(a + b)) for a, b in chosen)


def _story_document(rng: random.Random) -> str:
    cast = rng.sample(range(ENTITY_COUNT), rng.choice((1, 2, 2)))
    text, untold = story_opening(rng, cast, rng.randint(1, 4))
    asked = untold[: rng.randint(2, 6)]
    return "\n".join([text, *(turn(fact.training_question(rng), fact.value) for fact in asked)])


_KINDS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (_fact_document, 12),
    (_profile_document, 18),
    (_question_document, 30),
    (_sum_document, 20),
    (_story_document, 20),
)


def document_stream(seed: int) -> Iterator[str]:
    """An endless stream of documents; the same seed gives the same stream in every process."""
    rng = random.Random(seed)
    kinds = [kind for kind, _ in _KINDS]
    weights = [weight for _, weight in _KINDS]
    while True:
        yield rng.choices(kinds, weights)[0](rng)


def calibration_texts(seed: int = 0, documents: int = 2000) -> list[str]:
    """Documents of the world to calibrate a mapper on.

    Args:
        seed: Which documents; never those of the training stream or of the tasks.
        documents: How many. One has 4 to 120 tokens, 51 on average; a training row packs them up to 512 tokens.

    Returns:
        The texts, without end-of-text marks.
    """
    stream = document_stream(1_000_003 + seed)
    return [next(stream) for _ in range(documents)]
