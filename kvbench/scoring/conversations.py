"""Conversations about a story: where they come from, and how they become tokens that only ever grow at the end."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.embedded.items import turn_items
from kvbench.errors import BadInputError
from kvbench.scoring.batching import Tokens

EMBEDDED = "embedded:turns"
COQA = "coqa"
HUB_ID, HUB_SPLIT = "EleutherAI/coqa", "validation"
LOCAL_SPLITS = ("test", "validation", "dev")
# As many stories as the task tiny_turns has; they leave six facts or more to ask for.
EMBEDDED_STORIES, EMBEDDED_TURNS = 60, 8


@dataclass(frozen=True)
class Conversation:
    """A story and questions about it.

    Attributes:
        name: of the conversation, unique.
        opening: the story.
        questions: text from the end of the last answer to where the next one begins.
        golds: gold answers of each question; the first is the one that a gold history repeats.
    """

    name: str
    opening: str
    questions: tuple[str, ...]
    golds: tuple[tuple[str, ...], ...]

    @property
    def turns(self) -> int:
        """Number of questions."""
        return len(self.questions)


@dataclass(frozen=True)
class Script:
    """A conversation as tokens.

    Attributes:
        conversation: the text.
        opening: tokens of the story.
        questions: tokens of each question.
        golds: tokens of each gold answer as the history repeats it.
        cut: story tokens left out on the left so that the conversation fits.
        dropped: last turns left out because even without a story they do not fit.
    """

    conversation: Conversation
    opening: Tokens
    questions: tuple[Tokens, ...]
    golds: tuple[Tokens, ...]
    cut: int
    dropped: int

    @property
    def turns(self) -> int:
        """Number of questions kept."""
        return len(self.questions)


def load_conversations(
    data: str, data_dir: Path | None, *, count: int | None = None, max_turns: int | None = None, seed: int = 0
) -> list[Conversation]:
    """Load conversations.

    Args:
        data: `coqa` or `embedded:turns`.
        data_dir: folder with `coqa/test.jsonl` (or validation, dev) in the schema of EleutherAI/coqa; None asks the hub.
        count: take so many, at random; the sets of one seed are nested. None takes all.
        max_turns: first turns only.
        seed: of the choice.

    Raises:
        BadInputError: unknown data, no such file, rows of another schema, too few conversations.
    """
    for name, value in (("conversations", count), ("max-turns", max_turns)):
        if value is not None and value < 1:
            raise BadInputError(f"--{name} {value}; it must be at least 1")
    if data == EMBEDDED:
        found = embedded_conversations(max(EMBEDDED_STORIES, count or 0))
    elif data == COQA:
        found = coqa_conversations(_hub_rows() if data_dir is None else _local_rows(data_dir / COQA))
    else:
        raise BadInputError(f"unknown conversations '{data}'; use '{COQA}' (with --data-dir for local rows) or '{EMBEDDED}'")
    if count is not None:
        if count > len(found):
            raise BadInputError(f"--conversations {count}, but '{data}' has {len(found)}; ask for fewer")
        order = list(range(len(found)))
        random.Random(f"conversations {seed}").shuffle(order)
        found = [found[i] for i in sorted(order[:count])]
    if max_turns is None:
        return found
    return [Conversation(c.name, c.opening, c.questions[:max_turns], c.golds[:max_turns]) for c in found]


def embedded_conversations(count: int) -> list[Conversation]:
    """Stories of the embedded world with six to eight questions each, in the form of the task tiny_turns."""
    grouped: dict[int, list[Any]] = {}
    for item in turn_items(count, seed=0, turns=EMBEDDED_TURNS):
        grouped.setdefault(item["conversation"], []).append(item)
    found = []
    for number, items in grouped.items():
        answers = [item["choices"][item["gold"]] for item in items]
        first = items[0]["context"].index("\nQuestion:")
        starts = [first] + [len(item["context"]) + 1 + len(answer) for item, answer in zip(items, answers, strict=True)]
        questions = tuple(item["context"][start:] for item, start in zip(items, starts, strict=False))
        found.append(Conversation(f"turns-{number}", items[0]["context"][:first], questions, tuple((answer,) for answer in answers)))
    return found


def coqa_conversations(rows: Sequence[Mapping[str, Any]]) -> list[Conversation]:
    """Rows in the schema of EleutherAI/coqa, prompted as lm-eval's stock task coqa does.

    Raises:
        BadInputError: names the row and what it lacks; doubled ids.
    """
    found, names = [], set()
    for number, row in enumerate(rows):
        try:
            story, asked, answered = row["story"], row["questions"]["input_text"], row["answers"]["input_text"]
            others = [extra["input_text"] for _, extra in sorted((row.get("additional_answers") or {}).items())]
            golds = [[answered[turn], *(extra[turn] for extra in others)] for turn in range(len(asked))]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadInputError(
                f"conversation {number} is not a row of EleutherAI/coqa ({type(error).__name__}: {error}); it needs story, questions.input_text and as many answers.input_text"
            ) from error
        name = str(row.get("id") or number)
        if name in names or not asked or not str(story).strip():
            raise BadInputError(
                f"conversation {number} (id '{name}') {'comes twice' if name in names else 'has no story or no question'}; mend the data"
            )
        names.add(name)
        questions = tuple(f"\n\nQ: {question}\n\nA:" for question in asked)
        found.append(Conversation(name, str(story).strip(), questions, tuple(_distinct(g) for g in golds)))
    return found


def _distinct(golds: Sequence[str]) -> tuple[str, ...]:
    """Answers that differ by more than case, in order, as the stock task counts them."""
    return tuple({gold.lower(): gold for gold in reversed(golds)}[key] for key in dict.fromkeys(gold.lower() for gold in golds))


def _local_rows(folder: Path) -> list[dict[str, Any]]:
    files = [folder / f"{split}.jsonl" for split in LOCAL_SPLITS]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        raise BadInputError(f"there are no CoQA rows in '{folder}'; it needs one of {', '.join(f.name for f in files)}")
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise BadInputError(f"'{file}' cannot be read: {error}; it is one JSON object per line") from error
    if not rows:
        raise BadInputError(f"'{file}' is empty; it is one JSON object per line")
    return rows


def _hub_rows() -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return list(load_dataset(HUB_ID, split=HUB_SPLIT))
    except Exception as error:  # datasets raises its own, the hub's and the network's errors
        raise BadInputError(
            f"cannot load {HUB_ID} from the hub ({type(error).__name__}); without a network, give local rows with --data-dir"
        ) from error


def fingerprint(conversations: Sequence[Conversation]) -> str:
    """SHA-256 over all text that the conversations hold."""
    return hashlib.sha256(json.dumps([asdict(c) for c in conversations], sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def tokenise(conversation: Conversation, tokenizer: Any, *, limit: int, answer_room: int, gold_history: bool) -> Script:
    """Tokens of a conversation, cut on the left once, before the first turn, so that the last turn still fits.

    A cache that lives through the conversation cannot lose tokens at its start: all later positions would move.

    Args:
        conversation: the text.
        tokenizer: of the pair.
        limit: positions that both models have.
        answer_room: longest answer, tokens.
        gold_history: whether the history repeats gold answers (whose length is known) or generated ones.

    Raises:
        BadInputError: not even the first question fits.
    """
    opening = _encode(tokenizer, conversation.opening)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer.encode(conversation.opening)[:1] == [bos] and opening[:1] != (bos,):
        opening = (bos, *opening)
    questions, golds = [], []
    before = conversation.opening
    for question, gold in zip(conversation.questions, conversation.golds, strict=True):
        questions.append(_encode_behind(tokenizer, before, question))
        golds.append(answer_tokens(tokenizer, question, gold[0]))
        before = f" {gold[0]}"
    used = [0]
    for question_tokens, gold_tokens in zip(questions, golds, strict=True):
        used.append(used[-1] + len(question_tokens) + (len(gold_tokens) if gold_history else answer_room))
    # Up to turn t: all turns before it, its question, room for its answer.
    needed = [used[t] + len(questions[t]) + answer_room for t in range(len(questions))]
    # At least one story token stays, so that there is always something to transfer.
    turns = sum(n + 1 <= limit for n in needed)
    if turns == 0:
        raise BadInputError(
            f"the first question of conversation '{conversation.name}' does not fit the position limit of {limit} with answers of {answer_room} tokens; lower --max-new-tokens"
        )
    keep = min(len(opening), limit - needed[turns - 1])
    cut = len(opening) - keep
    return Script(conversation, opening[cut:], tuple(questions[:turns]), tuple(golds[:turns]), cut, conversation.turns - turns)


def answer_tokens(tokenizer: Any, question: str, answer: str) -> Tokens:
    """An answer as the history repeats it, behind its question."""
    return _encode_behind(tokenizer, question, f" {answer}") if answer else ()


def _encode(tokenizer: Any, text: str) -> Tokens:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _encode_behind(tokenizer: Any, before: str, text: str) -> Tokens:
    """Tokens of `text` as they come behind `before`; some tokenizers mark the start of a text, which this is not."""
    head, whole = _encode(tokenizer, before), _encode(tokenizer, before + text)
    return whole[len(head) :] if whole[: len(head)] == head else _encode(tokenizer, text)
