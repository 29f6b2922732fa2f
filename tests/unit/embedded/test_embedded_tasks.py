"""The tiny_* tasks load through lm-eval and have the promised form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

TASKS = Path(__file__).parents[3] / "tasks"
COUNTS = {"tiny_choice": 240, "tiny_fewshot": 240, "tiny_sums": 120, "tiny_prefix": 64, "tiny_turns": 240}


@pytest.fixture(scope="module")
def tasks() -> dict[str, object]:
    from lm_eval.tasks import TaskManager

    loaded: dict[str, object] = TaskManager(include_path=str(TASKS), include_defaults=False).load(list(COUNTS))["tasks"]
    return loaded


def test_group_holds_all_five() -> None:
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_path=str(TASKS), include_defaults=False).load("tiny_suite")
    assert sorted(loaded["tasks"]) == sorted(COUNTS)
    assert list(loaded["groups"]) == ["tiny_suite"]


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_item_counts(tasks: dict[str, object], name: str, count: int) -> None:
    assert len(tasks[name].test_docs()) == count  # type: ignore[attr-defined]


def test_fewshot_examples_are_other_facts(tasks: dict[str, object]) -> None:
    task = tasks["tiny_fewshot"]
    asked = set(task.test_docs()["context"])  # type: ignore[attr-defined]
    assert not asked & set(task.fewshot_docs()["context"])  # type: ignore[attr-defined]
    assert task.config.num_fewshot == 3  # type: ignore[attr-defined]


def test_prefix_perplexity_is_per_token_over_all_documents(tasks: dict[str, object]) -> None:
    task = tasks["tiny_prefix"]
    scored = [task.process_results({"tokens": n}, [(nats, False)]) for nats, n in ((-3.0, 2), (-9.0, 4))]  # type: ignore[attr-defined]
    aggregate = task.aggregation()["token_perplexity"]  # type: ignore[attr-defined]
    assert aggregate([score["token_perplexity"] for score in scored]) == pytest.approx(math.exp(12 / 6))
    assert task.higher_is_better() == {"token_perplexity": False}  # type: ignore[attr-defined]
