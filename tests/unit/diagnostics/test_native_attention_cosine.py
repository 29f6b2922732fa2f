"""The native attention-output cosine against a slow definition: one query, one head, one dictionary of scores at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvbench.diagnostics.attention import AttentionJudge, native_attention_cosine, prefix_of
from kvbench.errors import BadInputError
from kvbench.kv.capture import to_content
from kvbench.mappers.controls import control

PREFIX, TOKENS = 7, 12


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(5, 60, (2, TOKENS))


def _mapped(target, rows, scale: float):
    """The target's own content, keys and values distorted, layer by layer."""
    content = prefix_of(to_content(target.prefill(rows.tolist()), target.rope), PREFIX)
    noise = torch.Generator().manual_seed(1)
    keys = [k + scale * torch.randn(k.shape, generator=noise) for k in content.keys]
    values = [v + scale * torch.randn(v.shape, generator=noise) for v in content.values]
    return lambda layer: (keys[layer], values[layer])


def _slow(target, mapped, rows) -> list[float]:
    """The definition in docs/diagnostics.md, with queries from the attention module's own projections on its own input."""
    seen: dict[int, torch.Tensor] = {}
    handles = [
        block.self_attn.register_forward_pre_hook(lambda _m, _a, kwargs, i=i: seen.__setitem__(i, kwargs["hidden_states"]), with_kwargs=True)
        for i, block in enumerate(target.blocks)
    ]
    with torch.no_grad():
        native = target.prefill(rows.tolist())
    for handle in handles:
        handle.remove()
    cos, sin = target.rope.cos_sin(torch.arange(TOKENS)[None])
    heads, groups = target.config.num_attention_heads, target.config.num_attention_heads // target.kv_heads
    out = []
    for layer, block in enumerate(target.blocks):
        with torch.no_grad():
            queries = block.self_attn.q_proj(seen[layer]).view(len(rows), TOKENS, heads, target.head_dim)
            if hasattr(block.self_attn, "q_norm"):
                queries = block.self_attn.q_norm(queries)
        queries = target.rope.apply(queries, cos, sin).double()
        keys, values = mapped(layer)
        keys = target.rope.apply(keys, cos[:, :PREFIX], sin[:, :PREFIX]).double()
        cosines = []
        for b in range(len(rows)):
            for head in range(heads):
                kv = head // groups
                for position in range(PREFIX, TOKENS):
                    outputs = []
                    for use_mapped in (True, False):
                        score, value = {}, {}
                        for j in range(position + 1):
                            own_key, own_value = native.keys[layer][b, kv, j].double(), native.values[layer][b, kv, j].double()
                            take = use_mapped and j < PREFIX
                            key, value[j] = (keys[b, j, kv], values[b, j, kv].double()) if take else (own_key, own_value)
                            score[j] = math.exp(float(queries[b, position, head] @ key) / math.sqrt(target.head_dim))
                        total = sum(score.values())
                        outputs.append(sum(score[j] / total * value[j] for j in score))
                    cosines.append(float(outputs[0] @ outputs[1] / (outputs[0].norm() * outputs[1].norm())))
        out.append(sum(cosines) / len(cosines))
    return out


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_against_the_slow_definition(tiny, rows, kind):
    target = tiny(layers=2, kind=kind)
    mapped = _mapped(target, rows, 0.5)
    found = native_attention_cosine(target, mapped, rows, PREFIX)
    assert found.tolist() == pytest.approx(_slow(target, mapped, rows), abs=1e-5)
    assert float(found.max()) < 0.999


def test_the_own_prefix_gives_one(tiny, rows):
    target = tiny(layers=2)
    assert native_attention_cosine(target, _mapped(target, rows, 0.0), rows, PREFIX).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


def test_the_judge_is_the_mean_over_batches(tiny, rows):
    source, target = tiny(layers=2, seed=3), tiny(layers=3)
    mapper = control("raw", target_layers=3, kv_heads=target.kv_heads, head_dim=target.head_dim)
    content = prefix_of(to_content(source.prefill(rows.tolist()), source.rope), PREFIX)
    whole = native_attention_cosine(target, lambda layer: mapper.map_layer(content, layer), rows, PREFIX)
    judge = AttentionJudge(source, target, rows, PREFIX, batch_size=1)
    assert judge.per_layer([mapper])[0].tolist() == pytest.approx(whole.tolist(), abs=1e-5)
    scores = judge([mapper, mapper])
    assert scores[0] == scores[1]
    assert list(scores[0].values()) == pytest.approx([float(whole.mean()), float(whole.min())], abs=1e-5)


@pytest.mark.parametrize("prefix", [0, TOKENS])
def test_nothing_to_compare(tiny, rows, prefix):
    with pytest.raises(BadInputError, match=f"prefix of {prefix} tokens"):
        native_attention_cosine(tiny(), lambda layer: (torch.empty(0), torch.empty(0)), rows, prefix)
