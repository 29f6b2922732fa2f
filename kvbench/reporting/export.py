"""Per-item scores for consumers that compute their own intervals (arms.json), and the items that the page shows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from pydantic import JsonValue

from kvbench.reporting.comparison import Compared
from kvbench.reporting.metrics import TaskData
from kvbench.runs.pairing import PairedItems

ARMS_VERSION = 1
"""Of arms.json."""
PAGE_ITEMS = 300
"""Items per task in the page; the differing ones first."""
PAGE_PROMPT = 1_500
"""Last characters of a prompt in the page."""


def arms_json(compared: Compared) -> dict[str, JsonValue]:
    """Scores by task and arm in one fixed order of items, with the reference arm named.

    A score of `null` is undefined. For `kind` nll a score is a total in nats and `sizes` are its tokens.
    """
    comparison = compared.comparison
    tasks: list[JsonValue] = []
    for data in compared.tasks:
        view = data.view
        tasks.append(
            {
                "task": view.task,
                "filter": view.filter,
                "metric": view.metric,
                "kind": view.kind,
                "higher_is_better": view.higher_is_better,
                "chance": view.chance,
                "primary": view.primary,
                "items": [f"{task}/{doc}" for task, doc in data.items],
                "groups": None if data.groups is None else [str(group) for group in data.groups],
                "sizes": None if data.sizes is None else [float(size) for size in data.sizes],
                "scores": {arm: [float(score) if np.isfinite(score) else None for score in scores] for arm, scores in data.scores.items()},
            }
        )
    return {"format": "kvbench-arms", "version": ARMS_VERSION, "reference": comparison.reference_arm, "tasks": tasks}


LEFT_OUT = "(left out of this report)"


def page_items(compared: Compared, *, prompts: bool = True) -> dict[str, JsonValue]:
    """What the flips browser of the page shows: the headline tasks' items with prompt, choices and all arms' answers.

    Args:
        compared: the comparison and its items.
        prompts: include the items' texts; off where a report must not carry the data set's rows.
    """
    comparison = compared.comparison
    tasks: list[JsonValue] = []
    items: list[JsonValue] = []
    omitted: dict[str, JsonValue] = {}
    for data in compared.tasks:
        if not data.view.primary:
            continue
        answers = _answers(compared.paired, data)
        chosen = _chosen(data)
        if len(chosen) < data.view.n:
            omitted[data.view.task] = data.view.n - len(chosen)
        number = len(tasks)
        tasks.append({"name": data.view.task, "metric": data.view.metric, "higher": data.view.higher_is_better, "nll": data.view.kind == "nll"})
        for index in chosen:
            item = _item(number, data, index, answers)
            items.append(item if prompts else _without_texts(item))
    arms: list[JsonValue] = [arm.name for arm in comparison.arms]
    return {
        "arms": arms,
        "arm": comparison.mappers[0] if comparison.mappers else arms[-1],
        "reference": comparison.reference_arm,
        "tasks": tasks,
        "items": items,
        "omitted": omitted,
    }


Answers: TypeAlias = dict[tuple[str, str], dict[int, dict[Hashable, Any]]]
"""Sample rows by (task, arm) and doc_id."""
_SHOWN = ["loglikelihoods", "choice", "text", "response", "prompt", "choices", "gold", "gold_choice"]


def _answers(paired: Sequence[PairedItems], data: TaskData) -> Answers:
    wanted = set(data.view.pooled) or {data.view.task}
    return {
        (items.task, arm): dict(zip(items.doc_ids, frame[_SHOWN].to_dict("records"), strict=True))
        for items in paired
        if items.task in wanted and items.filter == data.view.filter
        for arm, frame in items.frames.items()
    }


def _chosen(data: TaskData) -> list[int]:
    """At most `PAGE_ITEMS` items, those on which arms differ first, in the order of the task."""
    scores = np.vstack(list(data.scores.values()))
    differs = np.any(scores != scores[:1], axis=0)
    order = np.concatenate([np.flatnonzero(differs), np.flatnonzero(~differs)])[:PAGE_ITEMS]
    return [int(i) for i in np.sort(order)]


def _without_texts(item: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """An item's scores without the data set's own words."""
    choices, answers = item["c"], item["a"]
    assert isinstance(choices, list)
    assert isinstance(answers, dict)
    kept = {arm: {k: v for k, v in answer.items() if k not in ("x", "r")} for arm, answer in answers.items() if isinstance(answer, dict)}
    names: list[JsonValue] = [f"choice {i + 1}" for i in range(len(choices))]
    return {**item, "p": LEFT_OUT, "cut": 0, "c": names, "g": None, "a": dict(kept)}


def _item(number: int, data: TaskData, index: int, given: Answers) -> dict[str, JsonValue]:
    task, doc = data.items[index]
    answers: dict[str, JsonValue] = {}
    rows = {arm: given[task, arm][doc] for arm in data.scores}
    for arm, scores in data.scores.items():
        row = rows[arm]
        score = float(scores[index])
        size = float(data.sizes[index]) if data.sizes is not None else 1.0
        answer: dict[str, JsonValue] = {"s": round(score / size, 5) if np.isfinite(score) else None}
        logprobs = [None if value is None or not np.isfinite(value) else round(float(value), 3) for value in row["loglikelihoods"]]
        if logprobs:
            answer["l"] = list(logprobs)
        if not pd.isna(row["choice"]):
            answer["k"] = int(row["choice"])
        if isinstance(row["text"], str):
            answer["x"] = row["text"][:PAGE_PROMPT]
            if isinstance(row["response"], str) and row["response"] != row["text"]:
                answer["r"] = row["response"][:PAGE_PROMPT]
        answers[arm] = answer
    row = next(iter(rows.values()))
    prompt = str(row["prompt"])
    return {
        "t": number,
        "d": doc if not data.view.pooled else f"{task}/{doc}",
        "p": prompt if len(prompt) <= PAGE_PROMPT else prompt[-PAGE_PROMPT:],
        "cut": max(len(prompt) - PAGE_PROMPT, 0),
        "c": [str(choice) for choice in row["choices"]],
        "g": str(row["gold"])[:PAGE_PROMPT] if isinstance(row["gold"], str) else None,
        "gc": None if pd.isna(row["gold_choice"]) else int(row["gold_choice"]),
        "a": answers,
    }
