"""Folded grouped-query attention against transformers' eager function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

from kvbench.kv.attention import NAME, folded, folded_attention


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 5])
def test_equals_eager_attention(groups, queries):
    g = torch.Generator().manual_seed(0)
    batch, kv_heads, keys, width = 3, 2, 7, 8
    q = torch.randn(batch, kv_heads * groups, queries, width, generator=g)
    k, v = (torch.randn(batch, kv_heads, keys, width, generator=g) for _ in range(2))
    allowed = torch.rand(batch, 1, queries, keys, generator=g) > 0.4
    allowed[..., 0] = True
    module = SimpleNamespace(num_key_value_groups=groups, training=False, is_causal=True, layer_idx=0)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    wanted, _ = eager_attention_forward(module, q, k, v, additive, scaling=0.3)
    found, _ = folded_attention(module, q, k, v, allowed, scaling=0.3)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_backend_is_switched_for_a_moment_only(tiny):
    model = tiny()

    def broken() -> None:
        with folded(model.config):
            assert model.config._attn_implementation == NAME
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        broken()
    assert model.config._attn_implementation == "sdpa"
    eager = tiny(attention="eager")
    with folded(eager.config):
        assert eager.config._attn_implementation == "eager"
