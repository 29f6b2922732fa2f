"""Tiny random Llama pairs and their calibrations, built in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.pairs.locate import ModelRef
from kvbench.pairs.models import LoadedModel

VOCABULARY = 96
SEQUENCES, HELDOUT, SEQ_LEN = 6, 3, 40


@dataclass(frozen=True)
class Geometry:
    """Query heads, KV heads, and what differs between the two models."""

    name: str
    query_heads: int
    kv_heads: int
    source_layers: int = 3
    target_layers: int = 5
    source_hidden: int = 32
    target_hidden: int = 48
    source_kv_heads: int | None = None


GEOMETRIES = (
    Geometry("mha", 4, 4),
    Geometry("gqa", 4, 2),
    Geometry("mqa", 4, 1),
    Geometry("deeper_source", 4, 2, 5, 3, 48, 32),
    Geometry("mismatched_heads", 4, 2, source_kv_heads=1),
)


@dataclass(frozen=True)
class TinyPair:
    source: LoadedModel
    target: LoadedModel
    calibration: Calibration


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")), eos_token="w1")


def tiny_model(name: str, *, layers: int, hidden: int, query_heads: int, kv_heads: int, dtype: torch.dtype, seed: int) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=256,
        # Weights of ordinary size: with the usual 0.02 a tiny model hardly attends to anything.
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return LoadedModel(model.eval(), tokenizer(), ModelRef(name, name))


def blocks(seed: int = 0, sequences: int = SEQUENCES, heldout: int = HELDOUT, seq_len: int = SEQ_LEN) -> TokenBlocks:
    rng = np.random.default_rng(seed)
    # Few distinct tokens, so that two random models agree on more than noise.
    draw = [rng.integers(0, 12, (n, seq_len)).astype(np.int32) for n in (sequences, heldout)]
    return TokenBlocks(draw[0], draw[1], sequences, heldout)


def tiny_pair(
    folder: Path, geometry: Geometry, dtype: torch.dtype = torch.float32, *, stride: int = 2, tokens: TokenBlocks | None = None
) -> TinyPair:
    """A pair and its calibration, with moments of rotated keys too."""
    g = geometry
    made = []
    for name, layers, hidden, kv_heads, seed in (
        ("tiny-source", g.source_layers, g.source_hidden, g.source_kv_heads or g.kv_heads, 1),
        ("tiny-target", g.target_layers, g.target_hidden, g.kv_heads, 2),
    ):
        made.append(tiny_model(name, layers=layers, hidden=hidden, query_heads=g.query_heads, kv_heads=kv_heads, dtype=dtype, seed=seed))
    settings = HarvestSettings(stride=stride, batch_size=2, rotated=True)
    Harvest(made[0], made[1], tokens or blocks(), {"name": "random tokens", "seed": 0}, settings, folder).run()
    return TinyPair(made[0], made[1], Calibration(folder))
