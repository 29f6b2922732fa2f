"""Peak memory of applying a mapper: source cache + target cache + one layer's weights, and a tenth more at most."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvbench.kv.content import RotatedKV
from kvbench.kv.inject import PrefixCache
from kvbench.kv.rope import Rope
from kvbench.mappers import linear
from kvbench.mappers.linear import LinearMapper, MemoryStore
from kvbench.scoring.arms import Arm
from kvbench.scoring.engine import TransferEngine
from kvbench.timing.memory import PeakMemory

HEADS, DIM, SOURCE_LAYERS, TARGET_LAYERS, K = 8, 16, 24, 30, 8
BATCH, TOKENS = 4, 512


@pytest.mark.parametrize("kept", [True, False])
@torch.no_grad()
def test_applying_takes_little_more_than_both_caches(monkeypatch, kept):
    if not kept:
        monkeypatch.setattr(linear, "RESIDENT_BYTES", 0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HEADS * DIM,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
    )
    rope = Rope(AutoModelForCausalLM.from_config(config))
    width, device = HEADS * DIM, torch.device("cpu")
    starts = [min(t * SOURCE_LAYERS // TARGET_LAYERS, SOURCE_LAYERS - K) for t in range(TARGET_LAYERS)]
    layers = [tuple(range(start, start + K)) for start in starts]
    tensors = {f"target.{t}.{q}.W": torch.randn(K * width, width) for t in range(TARGET_LAYERS) for q in "kv"}
    tensors |= {f"target.{t}.{q}.b": torch.randn(width) for t in range(TARGET_LAYERS) for q in "kv"}
    arm = Arm("ridge", "target", LinearMapper(layers, width, HEADS, DIM, MemoryStore(tensors)))
    caches = [torch.randn(BATCH, HEADS, TOKENS, DIM).bfloat16() for _ in range(2 * SOURCE_LAYERS)]
    kv = RotatedKV(caches[:SOURCE_LAYERS], caches[SOURCE_LAYERS:], torch.full((BATCH,), TOKENS))
    # The transfer reads nothing else of a model.
    model = SimpleNamespace(rope=rope, layers=TARGET_LAYERS, dtype=torch.bfloat16)
    engine = object.__new__(TransferEngine)

    def apply():
        cache = PrefixCache.allocate([device] * TARGET_LAYERS, (BATCH, HEADS, TOKENS, DIM), torch.bfloat16, TOKENS)
        engine.map_into(cache, slice(0, BATCH), 0, arm, model, kv, model)

    apply()
    with PeakMemory() as meter:
        apply()
    layer_bytes = 2 * BATCH * TOKENS * width * 2
    source, target, weights = SOURCE_LAYERS * layer_bytes, TARGET_LAYERS * layer_bytes, 2 * K * width * width * 2
    assert meter.peak_bytes > target
    assert source + meter.peak_bytes <= 1.1 * (source + target + weights)
