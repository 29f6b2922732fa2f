"""Calibration text: where it comes from, how it is packed, how fit and held-out parts are kept apart."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import BadInputError

TEXT_COLUMNS = ("text", "content", "page")
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>")


@dataclass(frozen=True)
class TokenBlocks:
    """Packed sequences, the two parts from disjoint documents.

    Attributes:
        fit: `[sequences, seq_len]` token ids.
        heldout: the same for the held-out part.
        fit_documents: documents that contribute to `fit`.
        heldout_documents: documents that contribute to `heldout`.
    """

    fit: NDArray[np.int32]
    heldout: NDArray[np.int32]
    fit_documents: int
    heldout_documents: int

    def fingerprint(self) -> str:
        """SHA-256 over the exact tokens of both parts."""
        digest = hashlib.sha256()
        for part in (self.fit, self.heldout):
            digest.update(str(part.shape).encode())
            digest.update(np.ascontiguousarray(part, dtype="<i4").tobytes())
        return digest.hexdigest()


def load_texts(spec: str) -> list[str] | Iterable[str]:
    """Documents named by `spec`.

    Args:
        spec: a `.jsonl`, `.txt` or `.parquet` file (`:column` may follow), `embedded:world`, or a hub data set
            `id[:config][:split][:column]`.

    Raises:
        BadInputError: missing, unreadable, without the column, or empty.
    """
    if spec == "embedded:world":
        from kvbench.embedded.corpus import calibration_texts

        return calibration_texts()
    if spec.startswith("embedded:"):
        raise BadInputError(f"there is no embedded text '{spec}'; there is embedded:world")
    path_text, _, column = spec.partition(":")
    path = Path(path_text)
    if path.suffix in {".jsonl", ".txt", ".parquet"} or path.exists():
        if not path.is_file():
            raise BadInputError(f"calibration text '{path}' does not exist; give a .jsonl, .txt or .parquet file or a hub data set id")
        try:
            texts = _read_file(path, column or None)
        except UnicodeDecodeError as error:
            raise BadInputError(f"calibration text '{path}' is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from error
        if not any(text.strip() for text in texts):
            raise BadInputError(f"calibration text '{path}' has no text in it; give a file with documents")
        return texts
    return _hub_texts(spec)


def _read_file(path: Path, column: str | None) -> list[str]:
    if path.suffix == ".txt":
        # Blank lines separate documents, as in most plain-text corpora; a file without any is one document.
        return [part for part in path.read_text(encoding="utf-8").split("\n\n\n") if part.strip()]
    rows: list[dict[str, Any]]
    if path.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise BadInputError(f"{path}, line {number}: not JSON ({error.msg}); one JSON object per line is expected") from error
                if not isinstance(row, dict):
                    raise BadInputError(f"{path}, line {number}: a {type(row).__name__} instead of a JSON object")
                rows.append(row)
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(path).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInputError(f"{path} is not a parquet file: {error}") from error
    else:
        raise BadInputError(f"calibration text '{path}' has suffix '{path.suffix}'; .jsonl, .txt and .parquet are read")
    if not rows:
        raise BadInputError(f"calibration text '{path}' has no rows")
    name = _column(list(rows[0]), column, str(path))
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get(name), str):
            raise BadInputError(f"{path}, row {number}: column '{name}' holds {type(row.get(name)).__name__}, not text")
    return [row[name] for row in rows]


def _column(columns: list[str], wanted: str | None, where: str) -> str:
    if wanted:
        if wanted not in columns:
            raise BadInputError(f"{where} has no column '{wanted}'; it has {', '.join(sorted(columns))}")
        return wanted
    for name in TEXT_COLUMNS:
        if name in columns:
            return name
    raise BadInputError(f"{where} has none of the columns {', '.join(TEXT_COLUMNS)}; name one of {', '.join(sorted(columns))} behind a colon")


def _hub_texts(spec: str) -> Iterable[str]:
    import datasets

    name, *rest = spec.split(":")
    config, split, column = ([part or None for part in rest] + [None] * 3)[:3]
    try:
        stream = datasets.load_dataset(name, config, split=split or "train", streaming=True)
        columns = list(stream.column_names or next(iter(stream)))
    except Exception as error:  # the hub client raises many unrelated types; all of them mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(
            f"cannot read data set '{spec}' ({type(error).__name__}: {reason}); check id, config and split, or download it and give a .jsonl or .parquet file"
        ) from error
    chosen = _column(columns, column, f"data set '{name}'")
    return (row[chosen] for row in stream)


def end_of_text_id(tokenizer: Any) -> int:
    """The id that separates documents: the tokenizer's end-of-text token, else its end-of-sequence token.

    Chat models often name the end of a turn as their eos, which never separated documents in pre-training.

    Raises:
        BadInputError: the tokenizer has neither.
    """
    vocabulary = tokenizer.get_vocab()
    for token in END_OF_TEXT:
        if token in vocabulary:
            return int(vocabulary[token])
    if tokenizer.eos_token_id is None:
        raise BadInputError("the tokenizer has no end-of-text and no end-of-sequence token, so documents cannot be separated")
    return int(tokenizer.eos_token_id)


def pack(texts: Iterable[str], tokenizer: Any, *, sequences: int, heldout: int, seq_len: int, seed: int | None) -> TokenBlocks:
    """Pack documents into sequences, first the fit part, then the held-out part.

    Documents are separated by the end-of-text id. A document whose tokens fill the end of the fit part gives nothing to
    the held-out part, so no document is in both.

    Args:
        texts: documents.
        tokenizer: the pair's tokenizer.
        sequences: sequences of the fit part.
        heldout: sequences of the held-out part.
        seq_len: tokens per sequence.
        seed: shuffles the documents first; None keeps their order. Streams are shuffled within a buffer of 10,000.

    Raises:
        BadInputError: not enough text, or sizes that make no sense.
    """
    for what, value in (("sequences", sequences), ("held-out sequences", heldout), ("sequence length", seq_len)):
        if value < 1:
            raise BadInputError(f"{what} = {value}; it must be at least 1")
    separator = end_of_text_id(tokenizer)
    documents = iter(_shuffled(texts, seed))
    parts: list[NDArray[np.int32]] = []
    counts: list[int] = []
    for name, wanted in (("fit", sequences), ("held-out", heldout)):
        tokens, used = _fill(documents, tokenizer, separator, wanted * seq_len)
        if len(tokens) < wanted * seq_len:
            done = int(sum(len(p) for p in parts))
            raise BadInputError(
                f"not enough calibration text: the {name} part needs {wanted} sequences of {seq_len} tokens, but only {len(tokens) // seq_len} could be filled"
                f"{f' after {done} for fitting' if done else ''}; give more text, fewer or shorter sequences (--sequences, --heldout, --seq-len)"
            )
        parts.append(np.asarray(tokens[: wanted * seq_len], dtype=np.int32).reshape(wanted, seq_len))
        counts.append(used)
    return TokenBlocks(parts[0], parts[1], counts[0], counts[1])


def _fill(documents: Iterator[str], tokenizer: Any, separator: int, wanted: int) -> tuple[list[int], int]:
    tokens: list[int] = []
    used = 0
    for text in documents:
        if not text.strip():
            continue
        tokens.extend(tokenizer.encode(text, add_special_tokens=False))
        tokens.append(separator)
        used += 1
        if len(tokens) >= wanted:
            break
    return tokens, used


def _shuffled(texts: Iterable[str], seed: int | None) -> Iterable[str]:
    if seed is None:
        return texts
    rng = random.Random(seed)
    if isinstance(texts, list):
        order = list(range(len(texts)))
        rng.shuffle(order)
        return (texts[i] for i in order)
    return _buffered(iter(texts), rng)


def _buffered(texts: Iterator[str], rng: random.Random, size: int = 10_000) -> Iterator[str]:
    buffer: list[str] = []
    for text in texts:
        if len(buffer) < size:
            buffer.append(text)
            continue
        slot = rng.randrange(size)
        yield buffer[slot]
        buffer[slot] = text
    rng.shuffle(buffer)
    yield from buffer
