"""Tiny models on disk: a configuration and a tokenizer, no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from pair_models import SaveModel, byte_tokenizer, llama
from transformers import PretrainedConfig, PreTrainedTokenizerFast


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """Save a configuration (and a tokenizer) under a name; returns the directory."""

    def save(
        config: PretrainedConfig | None = None, tokenizer: PreTrainedTokenizerFast | None = None, name: str = "model", with_tokenizer: bool = True
    ) -> str:
        folder = tmp_path / name
        (llama() if config is None else config).save_pretrained(folder)
        if with_tokenizer:
            (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
        return str(folder)

    return save
