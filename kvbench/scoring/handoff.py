"""A multi-turn handoff run: every arm through the same conversations, stored batch by batch, resumable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from kvbench.errors import ArtifactError, BadInputError
from kvbench.pairs.models import LoadedModel
from kvbench.runs.files import disk_errors, read_stored, write_stored, write_whole
from kvbench.runs.schema import SCHEMA_VERSION, ArmSpec, ModelSpec, Stored
from kvbench.runs.store import first_difference
from kvbench.scoring.answers import answer_scores
from kvbench.scoring.arms import Answering
from kvbench.scoring.batching import Tokens
from kvbench.scoring.conversations import Script, answer_tokens
from kvbench.scoring.generation import GenerationSettings, Prompt
from kvbench.scoring.handoff_caches import answered
from kvbench.scoring.handoff_protocols import Protocol, Turn

History = Literal["gold", "generated"]
STOP = "\n"


class HandoffSpec(Stored):
    """Everything that decides the answers of a handoff run."""

    format: Literal["kvbench-handoff-spec"] = "kvbench-handoff-spec"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    source: ModelSpec
    """The model that prefills."""
    target: ModelSpec
    """The model that takes over."""
    mappers: tuple[ArmSpec, ...]
    """Source to target."""
    back_mappers: tuple[ArmSpec, ...] = ()
    """Target to source, for the protocol `alternate`."""
    protocols: tuple[str, ...]
    """per_turn, once, alternate."""
    data: str
    """Name of the conversations."""
    data_fingerprint: str
    """SHA-256 of all conversations used."""
    conversations: int
    """How many."""
    max_turns: int | None = None
    """Turns kept of each conversation; None keeps all."""
    history: History
    """Whether the history repeats gold or generated answers."""
    handoff_turn: int = Field(ge=1)
    """Turn at which the protocol `once` transfers."""
    hold_back: int = Field(ge=1)
    """Last context tokens that the answering model runs itself."""
    max_new_tokens: int = Field(ge=1)
    """Longest answer."""
    max_length: int
    """Positions used at most."""
    batch_size: int = Field(ge=1)
    """Conversations per batch."""
    dtype: str
    """Computing dtype."""
    device: str
    """Device."""
    attention: str
    """Attention backend."""


class TurnAnswer(Stored):
    """One answer of one arm."""

    conversation: str
    """Its name."""
    turn: int
    """1 is the first question."""
    protocol: str
    """per_turn, once, alternate, or the model alone: target, source."""
    arm: str
    """Mapper, or the model alone."""
    answered_by: Answering
    """Which model answered."""
    golds: tuple[str, ...]
    """Gold answers."""
    text: str
    """The answer, up to the end of the line."""
    f1: float
    """Token F1 against the gold answers."""
    exact_match: float
    """Exact match."""
    context_tokens: int
    """Tokens before the answer."""


class HandoffStore:
    """The answers of a handoff on disk, a file per batch.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def start(cls, path: Path, spec: HandoffSpec) -> HandoffStore:
        """Start a run, or resume it.

        Raises:
            BadInputError: the directory holds a run of another spec; names the first difference.
            KVBenchError: the disk is full.
        """
        file = path / "spec.json"
        if file.is_file():
            found = first_difference(read_stored(file, HandoffSpec).model_dump(mode="json"), spec.model_dump(mode="json"))
            if found is not None:
                name, stored, asked = found
                raise BadInputError(
                    f"'{path}' holds a handoff with {name} = {stored!r}, but this command asks for {asked!r}; repeat the command as it was to resume, or choose another --out"
                )
        elif path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInputError(f"'{path}' exists and is not a kvbench handoff; choose another --out")
        else:
            with disk_errors(path):
                path.mkdir(parents=True, exist_ok=True)
            write_stored(file, spec)
        return cls(path)

    def _file(self, batch: int) -> Path:
        return self.path / "answers" / f"batch-{batch:05d}.jsonl"

    def has(self, batch: int) -> bool:
        """Whether this batch is finished."""
        return self._file(batch).is_file()

    def write(self, batch: int, answers: Sequence[TurnAnswer]) -> None:
        """Store a finished batch, whole or not at all.

        Raises:
            KVBenchError: the disk is full; earlier batches are intact.
        """
        text = "".join(f"{answer.model_dump_json()}\n" for answer in answers)
        write_whole(self._file(batch), lambda path: path.write_text(text, encoding="utf-8"))

    def read(self, batch: int) -> list[TurnAnswer]:
        """The answers of a finished batch.

        Raises:
            ArtifactError: a damaged file.
        """
        file = self._file(batch)
        try:
            return [TurnAnswer.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise ArtifactError(f"'{file}' cannot be read: {str(error).splitlines()[0]}; delete it and repeat the command") from error


def run_handoff(
    scripts: Sequence[Script],
    store: HandoffStore,
    spec: HandoffSpec,
    models: Mapping[Answering, LoadedModel],
    start: Callable[[], list[Protocol]],
    *,
    progress: Callable[[int], None] | None = None,
) -> list[TurnAnswer]:
    """Answer all conversations with all arms, or read what is stored.

    Args:
        scripts: conversations as tokens.
        store: where finished batches are kept.
        spec: how to run.
        models: source and target.
        start: makes the protocols of one batch.
        progress: called with the number of turns just answered (or found answered).

    Raises:
        BadInputError: out of memory, or more tokens held back than a question has.
    """
    import torch

    shortest = min(len(question) for script in scripts for question in script.questions)
    if spec.hold_back >= shortest:
        raise BadInputError(f"--hold-back {spec.hold_back}, but the shortest question has {shortest} tokens; hold back fewer")
    found: list[TurnAnswer] = []
    for batch, first in enumerate(range(0, len(scripts), spec.batch_size)):
        members = scripts[first : first + spec.batch_size]
        if not store.has(batch):
            try:
                store.write(batch, converse(members, start(), models, spec, progress=progress))
            except torch.OutOfMemoryError as error:
                raise BadInputError(f"the device ran out of memory at batch size {spec.batch_size}; use a smaller --batch-size") from error
        elif progress:
            progress(sum(script.turns for script in members))
        found += store.read(batch)
    return found


def converse(
    scripts: Sequence[Script],
    arms: Sequence[Protocol],
    models: Mapping[Answering, LoadedModel],
    spec: HandoffSpec,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[TurnAnswer]:
    """Take a batch of conversations through all their turns, every arm at the same turn together.

    Returns:
        Answers by conversation in the order given, then turn, then arm.
    """
    # Longest first: the conversations that still go on are then always the first rows.
    order = sorted(range(len(scripts)), key=lambda i: (-scripts[i].turns, i))
    rows = [scripts[i] for i in order]
    settings = GenerationSettings(spec.max_new_tokens, (STOP,))
    histories: list[list[Tokens]] = [[script.opening for script in rows] for _ in arms]
    found: dict[tuple[int, int, int], TurnAnswer] = {}
    for number in range(1, rows[0].turns + 1):
        active = [script for script in rows if script.turns >= number]
        texts = _answer_turn(number, active, arms, histories, models, settings, spec.hold_back)
        for a, arm in enumerate(arms):
            for r, script in enumerate(active):
                talk, text = script.conversation, texts[a][r]
                question, golds = script.questions[number - 1], talk.golds[number - 1]
                asked = histories[a][r] + question
                scores = answer_scores(golds, text)
                found[order[r], number, a] = TurnAnswer(
                    conversation=talk.name,
                    turn=number,
                    protocol=arm.name,
                    arm=arm.arm,
                    answered_by=arm.answers(number),
                    golds=golds,
                    text=text,
                    f1=scores.f1,
                    exact_match=scores.exact_match,
                    context_tokens=len(asked),
                )
                histories[a][r] = asked + (script.golds[number - 1] if spec.history == "gold" else _repeated(script, number, text, models, spec))
        if progress:
            progress(len(active))
    return [found[key] for key in sorted(found)]


def _repeated(script: Script, turn: int, text: str, models: Mapping[Answering, LoadedModel], spec: HandoffSpec) -> Tokens:
    """A generated answer as the history repeats it: as text, so that every arm's history is written alike."""
    return answer_tokens(models["target"].tokenizer, script.conversation.questions[turn - 1], text)[: spec.max_new_tokens]


def _answer_turn(
    number: int,
    active: Sequence[Script],
    arms: Sequence[Protocol],
    histories: Sequence[Sequence[Tokens]],
    models: Mapping[Answering, LoadedModel],
    settings: GenerationSettings,
    hold_back: int,
) -> list[list[str]]:
    """Texts per arm and row; all arms that one model answers decode together."""
    stacks: dict[Answering, list[tuple[int, Any, list[Prompt]]]] = {"source": [], "target": []}
    for a, arm in enumerate(arms):
        contexts = [histories[a][r] + script.questions[number - 1] for r, script in enumerate(active)]
        prompts = [Prompt(context[:-hold_back], context[-hold_back:]) for context in contexts]
        kv = arm.cache(Turn(number, [prompt.prefix for prompt in prompts], [len(histories[a][r]) for r in range(len(active))]))
        stacks[arm.answers(number)].append((a, kv, prompts))
    texts: list[list[str]] = [[] for _ in arms]
    for role, members in stacks.items():
        if members:
            tokens = answered(role, models[role], [(kv, prompts) for _, kv, prompts in members], settings)
            for (a, _, _), answers in zip(members, tokens, strict=True):
                texts[a] = [_as_text(models[role], answer) for answer in answers]
    return texts


def _as_text(model: LoadedModel, tokens: list[int]) -> str:
    text: str = model.tokenizer.decode(tokens, skip_special_tokens=True)
    return text.split(STOP)[0].strip()
