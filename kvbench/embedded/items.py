"""Evaluation items of the small world, in the forms of the `tiny_*` tasks.

Every question is in the phrasing that training never used for its fact, sums are held out, and stories come from seeds of their own.
All functions are deterministic.
"""

from __future__ import annotations

import random
import re
from typing import TypedDict

from kvbench.embedded.corpus import story_opening
from kvbench.embedded.world import ATTRIBUTES, ENTITY_COUNT, Fact, facts, prompt, sum_question, sums, turn

CHOICES = 4


class ChoiceItem(TypedDict):
    """A four-way question: the context, what may follow it after a space, and which of them is right."""

    context: str
    choices: list[str]
    gold: int


class TurnItem(ChoiceItem):
    """A `ChoiceItem` that is turn number `turn`, from 0, of conversation number `conversation`."""

    conversation: int
    turn: int


class SumItem(TypedDict):
    """A sum to finish: the context and the digits that should follow it after a space."""

    context: str
    answer: str


class PrefixItem(TypedDict):
    """A document cut at the end of a sentence: `continuation` starts with the space, `tokens` are its tokens."""

    context: str
    continuation: str
    tokens: int


def token_count(text: str) -> int:
    """Tokens of a text of this world, without loading the tokenizer."""
    return len(re.findall(r"\n|[A-Za-z]+|[0-9]|[^A-Za-z0-9\s]", text))


def _options(fact: Fact, rng: random.Random) -> tuple[list[str], int]:
    """Four values of the fact's attribute in random order, and the place of the right one."""
    wrong = [value for value in ATTRIBUTES[fact.attribute].values if value != fact.value]
    options = [fact.value, *rng.sample(wrong, CHOICES - 1)]
    rng.shuffle(options)
    return options, options.index(fact.value)


def choice_items(count: int, seed: int) -> list[ChoiceItem]:
    """Distinct facts, each asked for on its own, at most 1,200."""
    rng = random.Random(f"choice {seed}")
    items: list[ChoiceItem] = []
    for fact in rng.sample(facts(), count):
        options, gold = _options(fact, rng)
        items.append({"context": prompt(fact.question(fact.held_out_phrasing)), "choices": options, "gold": gold})
    return items


def sum_items(count: int, seed: int, held_out: bool = True) -> list[SumItem]:
    """Distinct sums, at most 120 held-out ones; or such as training uses, for few-shot examples."""
    rng = random.Random(f"sums {seed}")
    pairs = rng.sample(sums()[1 if held_out else 0], count)
    return [{"context": prompt(sum_question(a, b)), "answer": str(a + b)} for a, b in pairs]


def prefix_items(count: int, seed: int) -> list[PrefixItem]:
    """Stories about two entities: four sentences are given, the rest is scored."""
    rng = random.Random(f"prefix {seed}")
    items: list[PrefixItem] = []
    for _ in range(count):
        text, _rest = story_opening(rng, rng.sample(range(ENTITY_COUNT), 2), rng.randint(8, 10))
        sentences = re.split(r"(?<=\.)(?= )", text)
        continuation = "".join(sentences[4:])
        items.append({"context": "".join(sentences[:4]), "continuation": continuation, "tokens": token_count(continuation)})
    return items


def turn_items(conversations: int, seed: int, turns: int = 4) -> list[TurnItem]:
    """One item per question turn of each story; the context holds the story and the true answers of the turns before."""
    rng = random.Random(f"turns {seed}")
    items: list[TurnItem] = []
    for conversation in range(conversations):
        history, untold = story_opening(rng, rng.sample(range(ENTITY_COUNT), 2), rng.randint(2, 4))
        for number, fact in enumerate(untold[:turns]):
            options, gold = _options(fact, rng)
            question = fact.question(fact.held_out_phrasing)
            context = f"{history}\n{prompt(question)}"
            items.append({"context": context, "choices": options, "gold": gold, "conversation": conversation, "turn": number})
            history = f"{history}\n{turn(question, fact.value)}"
    return items
