"""Fingerprints of a model's files, made in milliseconds and without any machine-learning library: what a router compares at start-up."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.pairs.locate import ModelRef

WHOLE = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "model.safetensors.index.json")
"""Hashed whole."""
SAMPLE_BYTES = 1 << 16
"""Of each end of a weight file; a whole one may have hundreds of gigabytes."""
SAMPLED = ".sample"
"""Behind the name of a file that is hashed at both ends only."""


def file_fingerprints(ref: ModelRef) -> dict[str, str]:
    """SHA-256 by file name: configuration and tokenizer whole, weight files by size and both ends.

    Args:
        ref: a local directory, a GGUF file, or a hub id whose files are in the local cache.

    Returns:
        Empty where nothing lies on this machine.
    """
    folder = _folder(ref)
    if folder is None:
        return {}
    if ref.gguf_file is not None:
        return {ref.gguf_file + SAMPLED: _sample(folder / ref.gguf_file)}
    found = {name: _whole(folder / name) for name in WHOLE if (folder / name).is_file()}
    return found | {path.name + SAMPLED: _sample(path) for path in sorted(folder.glob("*.safetensors"))}


def _folder(ref: ModelRef) -> Path | None:
    if ref.is_local:
        return Path(ref.path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(ref.path, "config.json", revision=ref.revision or "main")
    except HFValidationError:
        # A model that was built in memory has no place at all.
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sample(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - SAMPLE_BYTES))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
