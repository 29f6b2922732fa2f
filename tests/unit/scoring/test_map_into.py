"""The transfer by blocks of tokens against the plain steps over the whole prefix."""

from __future__ import annotations

import pytest
import torch

from kvbench.kv.capture import to_content
from kvbench.mappers.head_local import HeadLocalMapper
from kvbench.mappers.linear import LinearMapper, MemoryStore
from kvbench.mappers.low_rank import LowRankMapper
from kvbench.scoring import engine as engine_module
from kvbench.scoring.arms import Arm
from kvbench.scoring.engine import TransferEngine

LAYERS = ((0, 1), (1, 2), (0, 2), (2, 3), (3,))
TOKENS = [list(range(3, 40)), list(range(50, 70)), list(range(9, 31))]


def _mapper(kind: str, heads: int, dim: int):
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "linear": lambda k: {"W": (k * heads * dim, heads * dim), "b": (heads * dim,)},
        "head_local": lambda k: {"W": (heads, k * dim, dim), "b": (heads, dim)},
        "low_rank": lambda k: {"A": (k * heads * dim, 4), "B": (4, heads * dim), "b": (heads * dim,)},
    }[kind]
    tensors = {
        f"target.{t}.{q}.{name}": torch.randn(shape, generator=generator) / 4
        for t, layers in enumerate(LAYERS)
        for q in "kv"
        for name, shape in shapes(len(layers)).items()
    }
    mapper_class = {"linear": LinearMapper, "head_local": HeadLocalMapper, "low_rank": LowRankMapper}[kind]
    return mapper_class(LAYERS, heads * dim, heads, dim, MemoryStore(tensors))


@pytest.mark.parametrize("rows", [1, 8, 64, 4096])
@pytest.mark.parametrize("kind", ["linear", "head_local", "low_rank"])
def test_blocks_of_tokens_give_the_plain_result(tiny, monkeypatch, kind, rows):
    monkeypatch.setattr(engine_module, "BLOCK_ROWS", rows)
    source, target = tiny(layers=4, seed=1), tiny(layers=5, seed=2)
    arm = Arm("m", "target", _mapper(kind, target.kv_heads, target.head_dim))
    kv = source.prefill(TOKENS)
    cache = target.cache_for(4, kv.tokens + 6, kv.tokens + 3)
    TransferEngine(source, target, [arm]).map_into(cache, slice(1, 4), 3, arm, target, kv, source)
    content = to_content(kv, source.rope)
    cos, sin = target.rope.cos_sin(content.positions[:1])
    for layer in range(5):
        keys, values = arm.mapper.map_layer(content, layer)
        got = cache.layers[layer]
        torch.testing.assert_close(got.keys[1:, :, 3:-3], target.rope.apply(keys, cos, sin).transpose(1, 2), atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(got.values[1:, :, 3:-3], values.transpose(1, 2), atol=2e-5, rtol=2e-5)
        assert not got.keys[0].any()
        assert not got.keys[1:, :, :3].any()
        assert not got.keys[1:, :, -3:].any()


def test_a_source_layer_is_finished_after_its_last_reader():
    mapper = _mapper("linear", 2, 8)
    assert [sorted(mapper.finished(t)) for t in range(5)] == [[], [1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_subclass_with_its_own_map_layer_is_asked_for_both_at_once():
    class Both(LinearMapper):
        def map_layer(self, source, target_layer):
            return super().map_layer(source, target_layer)

    assert _mapper("linear", 2, 8).kinds_apart
    assert not Both(LAYERS, 16, 2, 8, MemoryStore({})).kinds_apart
