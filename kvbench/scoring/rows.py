"""Local rows of a data set: one JSON object per line, checked against what the stock task reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbench.errors import BadInputError

Row = Mapping[str, object]


class Field(NamedTuple):
    """A field that every row must have.

    Attributes:
        path: Name, with dots for nested objects.
        wanted: What it must be, for the message.
        fits: Whether a value is that.
    """

    path: str
    wanted: str
    fits: Callable[[object], bool]


def text(path: str) -> Field:
    """A string."""
    return Field(path, "a string", lambda value: isinstance(value, str))


def texts(path: str, count: int | None = None) -> Field:
    """A list of strings."""
    wanted = f"a list of {count} strings" if count else "a list of strings"
    return Field(
        path,
        wanted,
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value) and (len(value) == count if count else bool(value)),
    )


def label(path: str, *allowed: object) -> Field:
    """One of some values; the hub's unlabelled test splits fail here, instead of being scored against nothing."""
    named = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
    # True == 1, but it is no label.
    return Field(path, f"one of {named} (an unlabelled split cannot be scored)", lambda value: not isinstance(value, bool) and value in allowed)


def anything(path: str) -> Field:
    """Whatever the task makes of it."""
    return Field(path, "present", lambda value: True)


SCHEMAS: Mapping[str, tuple[Field, ...]] = {
    "allenai/ai2_arc": (text("question"), texts("choices.text"), texts("choices.label"), text("answerKey")),
    "Rowan/hellaswag": (text("activity_label"), text("ctx_a"), text("ctx_b"), texts("endings", 4), label("label", "0", "1", "2", "3", 0, 1, 2, 3)),
    "allenai/winogrande": (text("sentence"), text("option1"), text("option2"), label("answer", "1", "2")),
    "baber/piqa": (text("goal"), text("sol1"), text("sol2"), label("label", 0, 1)),
    "aps/super_glue:boolq": (text("passage"), text("question"), label("label", 0, 1)),
    "cais/mmlu": (text("question"), texts("choices", 4), label("answer", 0, 1, 2, 3)),
    "openai/gsm8k": (text("question"), text("answer")),
    "EleutherAI/coqa": (text("story"), texts("questions.input_text"), texts("answers.input_text")),
    "EleutherAI/wikitext_document_level": (text("page"),),
}
"""Fields by hub data set, or by data set and configuration where they differ."""


def check_rows(file: Path, fields: Sequence[Field]) -> int:
    """Read a file to its end.

    Args:
        file: JSON lines; empty lines are passed over, as the reader of the data sets library does.
        fields: what each row must have.

    Returns:
        The number of rows.

    Raises:
        BadInputError: no rows, a broken line, or a row that lacks a field or has another kind of value in it. File, line and field are named.
    """
    count = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    _check(_parsed(line, file, number), fields, file, number)
                    count += 1
    except UnicodeDecodeError as error:
        raise BadInputError(f"'{file}' is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise BadInputError(f"cannot read '{file}': {error.strerror or error}") from error
    if not count:
        raise BadInputError(f"'{file}' has no rows; write one JSON object per line in it, or leave the task out")
    return count


def _parsed(line: str, file: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadInputError(f"'{file}', line {number}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise BadInputError(
            f"'{file}', line {number}: a JSON {type(row).__name__}, not an object; each line must be one JSON object with the row's fields"
        )
    return row


def _check(row: Row, fields: Sequence[Field], file: Path, number: int) -> None:
    for wanted in fields:
        value: object = row
        for part in wanted.path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise BadInputError(
                    f"'{file}', line {number}: the field '{wanted.path}' is missing; the row has {', '.join(sorted(row)) or 'no fields'}. "
                    "Rows must have the schema of the hub data set that the stock task reads"
                )
            value = value[part]
        if not wanted.fits(value):
            shown = json.dumps(value, ensure_ascii=False)
            raise BadInputError(
                f"'{file}', line {number}: the field '{wanted.path}' is {shown[:80]}{'...' if len(shown) > 80 else ''}, but must be {wanted.wanted}"
            )
