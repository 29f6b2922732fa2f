"""CoQA as one item per turn: the story, the true answers so far, and the next question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from kvbench.scoring.answers import answer_scores


def turns(conversations: Iterable[Mapping[str, Any]]) -> Dataset:
    """Split conversations into turns, with the wording of lm-eval's stock `coqa` task.

    Args:
        conversations: rows of EleutherAI/coqa: `story`, `questions.input_text`, `answers.input_text`, and further annotators'
            answers under `additional_answers`, where there are any.

    Returns:
        Rows with `conversation` (id), `turn` (from 1, as CoQA counts), `context`, `question`, `answers` (the first is the main one).
    """
    rows = []
    for number, doc in enumerate(conversations):
        history = f"{doc['story']}\n\n"
        spoken = zip(doc["questions"]["input_text"], doc["answers"]["input_text"], strict=True)
        for turn, (question, answer) in enumerate(spoken, start=1):
            context = f"{history}Q: {question}\n\nA:"
            history = f"{context} {answer}\n\n"
            answers = [answer, *_other_answers(doc, turn, answer)]
            rows.append({"conversation": str(doc.get("id") or number), "turn": turn, "context": context, "question": question, "answers": answers})
    return Dataset.from_list(rows)


def scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Token F1 and exact match of one answer; of several golds each is left out in turn (CoQA's own rule, as stock `coqa` does)."""
    found = answer_scores(doc["answers"], results[0].strip().split("\n")[0])
    return {"f1": found.f1, "exact_match": found.exact_match}


def _other_answers(doc: Mapping[str, Any], turn: int, main: str) -> list[str]:
    """Further annotators' answers that differ from the ones before in more than case."""
    found: list[str] = []
    for annotator in (doc.get("additional_answers") or {}).values():
        answer = annotator["input_text"][turn - 1] if annotator else None
        if answer is not None and answer.lower() not in {known.lower() for known in (main, *found)}:
            found.append(answer)
    return found
