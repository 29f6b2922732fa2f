"""Data and scoring of the tiny_* tasks; the items come from the generator of the embedded world, so nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from datasets import Dataset

from kvbench.embedded.items import choice_items, prefix_items, sum_items, turn_items


def choice(**_settings: object) -> dict[str, Dataset]:
    """240 questions, one per fact, and 40 others as few-shot examples."""
    items = choice_items(count=280, seed=0)
    return {"test": Dataset.from_list(items[:240]), "train": Dataset.from_list(items[240:])}


def fewshot(**_settings: object) -> dict[str, Dataset]:
    """Other 240 questions and other examples."""
    items = choice_items(count=280, seed=1)
    return {"test": Dataset.from_list(items[:240]), "train": Dataset.from_list(items[240:])}


def sums(**_settings: object) -> dict[str, Dataset]:
    """All 120 held-out sums."""
    return {"test": Dataset.from_list(sum_items(count=120, seed=0)), "train": Dataset.from_list(sum_items(count=20, seed=0, held_out=False))}


def prefix(**_settings: object) -> dict[str, Dataset]:
    """64 documents, each a given prefix and a scored rest."""
    return {"test": Dataset.from_list(prefix_items(count=64, seed=0))}


def turns(**_settings: object) -> dict[str, Dataset]:
    """60 stories of four question turns each, one item per turn."""
    return {"test": Dataset.from_list(turn_items(conversations=60, seed=0))}


def prefix_scores(doc: Mapping[str, object], results: Sequence[tuple[float, bool]]) -> dict[str, tuple[float, object]]:
    """The log-likelihood of the rest of a document, in nats, with its token count."""
    log_likelihood, _greedy = results[0]
    return {"token_perplexity": (log_likelihood, doc["tokens"])}


def token_perplexity(items: Sequence[tuple[float, int]]) -> float:
    """exp(-nats / tokens), summed over all documents."""
    return math.exp(-sum(nats for nats, _ in items) / sum(tokens for _, tokens in items))
