"""Fingerprints of files: whole for what is small, both ends for weights, nothing where nothing lies here."""

from __future__ import annotations

import hashlib

from kvbench.embedded import member_path
from kvbench.pairs.files import SAMPLE_BYTES, file_fingerprints
from kvbench.pairs.locate import ModelRef, resolve


def test_small_files_are_hashed_whole_and_weights_at_both_ends(tmp_path):
    found = file_fingerprints(resolve("embedded:source"))
    folder = member_path("source")
    assert found["config.json"] == hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    content = (folder / "model.safetensors").read_bytes()
    ends = str(len(content)).encode() + content[:SAMPLE_BYTES] + content[-SAMPLE_BYTES:]
    assert found["model.safetensors.sample"] == hashlib.sha256(ends).hexdigest()


def test_another_byte_or_length_is_another_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    seen = set()
    for content in (b"a" * 300_000, b"a" * 299_999 + b"b", b"b" + b"a" * 299_999, b"a" * 300_001):
        weights.write_bytes(content)
        seen.add(file_fingerprints(ModelRef("m", str(tmp_path)))["model.safetensors.sample"])
    assert len(seen) == 4


def test_models_that_lie_nowhere_have_none():
    assert file_fingerprints(ModelRef("built in memory", "")) == {}
    assert file_fingerprints(ModelRef("org/never-downloaded", "org/never-downloaded")) == {}
