"""Held-out text for diagnostics, kept apart from what the mappers were fitted on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.calibration.corpus import load_texts, pack
from kvbench.calibration.moments import Calibration
from kvbench.calibration.sequences import load_tokens
from kvbench.errors import BadInputError


def heldout_text(
    data: str, tokenizer: Any, *, sequences: int, length: int, manifests: Sequence[Mapping[str, Any]]
) -> tuple[NDArray[np.int32], dict[str, Any]]:
    """Sequences of a text that no mapper was fitted on.

    A mapper calibrated on the same text tells how many documents its fit took and in which order; the sequences then come from behind them.

    Args:
        data: as in `kvbench.calibration.corpus.load_texts`.
        tokenizer: of the pair.
        sequences: how many.
        length: tokens of each.
        manifests: of the mappers.

    Returns:
        `[sequences, length]` and the record: name, fingerprint, how it was kept apart.

    Raises:
        BadInputError: too little text.
    """
    same = [m["calibration"] for m in manifests if m["calibration"].get("name") == data]
    needed = sequences * length
    if same:
        largest = max(same, key=lambda c: int(c["sequences"]) * int(c["seq_len"]))
        if any(c.get("seed") != largest.get("seed") for c in same):
            raise BadInputError(
                f"'{data}' is the calibration text of several mappers that drew it in different orders, so no part of it is new to all of them; "
                "give another text with --data"
            )
        seq_len = int(largest["seq_len"])
        blocks = pack(
            load_texts(data), tokenizer, sequences=int(largest["sequences"]), heldout=-(-needed // seq_len), seq_len=seq_len, seed=largest.get("seed")
        )
        tokens = blocks.heldout.reshape(-1)[:needed].reshape(sequences, length)
        apart = f"from documents behind the {int(largest['sequences'])} sequences of {seq_len} tokens that the fit took (seed {largest.get('seed')})"
        return tokens, record(data, tokens, apart)
    # pack wants a second part too; one token more than nothing.
    tokens = pack(load_texts(data), tokenizer, sequences=sequences, heldout=1, seq_len=length, seed=0).fit
    return tokens, record(data, tokens, "another text than that of the calibrations, as far as their names tell")


def heldout_of(calibration: Calibration, *, sequences: int, length: int) -> tuple[NDArray[np.int32], dict[str, Any]]:
    """The held-out sequences of stored moments, joined where longer ones are wanted.

    Raises:
        BadInputError: too few.
    """
    stored = load_tokens(calibration).heldout
    available = stored.size // length
    if available < 1:
        raise BadInputError(f"'{calibration.path}' holds {stored.size} held-out tokens, fewer than one sequence of {length}; take a shorter prefix")
    count = min(sequences, available)
    tokens = stored.reshape(-1)[: count * length].reshape(count, length)
    name = str(calibration.manifest["data"]["name"])
    return tokens, record(name, tokens, "the held-out part of the calibration, other documents than the fit's")


def record(name: str, tokens: NDArray[np.int32], apart: str) -> dict[str, Any]:
    """For diagnostics.json."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").tobytes()).hexdigest()
    return {"name": name, "fingerprint": digest, "sequences": len(tokens), "kept_apart": apart}
