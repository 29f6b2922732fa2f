"""RoPE off and on, against the model's own pre-rotation keys and an independent definition."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.errors import BadInputError
from kvbench.kv.capture import pre_rotation_keys, to_content
from kvbench.kv.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SETTINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}
ROWS = [[1, 5, 9, 13, 17, 21, 25, 29], [2, 4, 8, 16, 32]]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_stripped_keys_are_the_models_own_pre_rotation_keys(tiny, name, kind):
    model = tiny(rope=SETTINGS[name], kind=kind)
    with pre_rotation_keys(list(model.blocks), model.kv_heads, model.head_dim) as before:
        kv = model.prefill(ROWS)
    content = to_content(kv, model.rope)
    for layer in range(model.layers):
        torch.testing.assert_close(content.keys[layer], before[layer], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_strip_then_apply_is_exact(tiny, name):
    model = tiny(rope=SETTINGS[name])
    kv = model.prefill(ROWS)
    content = to_content(kv, model.rope)
    cos, sin = model.rope.cos_sin(content.positions)
    for layer in range(model.layers):
        torch.testing.assert_close(model.rope.apply(content.keys[layer], cos, sin).transpose(1, 2), kv.keys[layer], atol=2e-6, rtol=1e-5)


def test_yarn_attention_factor_is_undone(tiny):
    """YaRN (arXiv:2309.00071, section 3.4) scales cos and sin by 0.1 ln(s) + 1; a transpose would leave its square in the keys."""
    model = tiny(rope=SETTINGS["yarn"])
    cos, sin = model.rope.cos_sin(torch.tensor([[0, 3, 50]]))
    factor = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close((cos.square() + sin.square()).sqrt(), torch.full_like(cos, factor), atol=1e-5, rtol=1e-5)
    keys = torch.randn(1, 3, 2, 8)
    torch.testing.assert_close(model.rope.strip(model.rope.apply(keys, cos, sin), cos, sin), keys, atol=1e-5, rtol=1e-5)


def test_default_rotation_against_the_textbook(tiny):
    """Pair (i, i + d/2) turns by position * theta^(-2i/d) (arXiv:2104.09864, in the rotate-half layout)."""
    model = tiny()
    keys = torch.randn(1, 2, 1, 8)
    positions = torch.tensor([[3, 7]])
    turned = model.rope.apply(keys, *model.rope.cos_sin(positions))
    for t, position in enumerate((3, 7)):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            a, b = keys[0, t, 0, i], keys[0, t, 0, i + 4]
            assert turned[0, t, 0, i] == pytest.approx(float(a * math.cos(angle) - b * math.sin(angle)), abs=1e-5)
            assert turned[0, t, 0, i + 4] == pytest.approx(float(a * math.sin(angle) + b * math.cos(angle)), abs=1e-5)


def test_partial_rotary_leaves_the_rest_alone():
    keys = torch.randn(1, 3, 2, 8)
    cos, sin = torch.full((1, 3, 4), math.cos(0.3)), torch.full((1, 3, 4), math.sin(0.3))
    turned = Rope._turn(keys, cos, sin)
    assert torch.equal(turned[..., 4:], keys[..., 4:])
    assert not torch.allclose(turned[..., :4], keys[..., :4])


def test_length_dependent_rope_is_refused_by_name(tiny):
    with pytest.raises(BadInputError, match="dynamic"):
        tiny(rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})


def test_hooks_are_gone_after_an_exception(tiny):
    model = tiny()

    def hooks() -> int:
        return sum(len(m._forward_hooks) for m in model.model.modules())

    before = hooks()

    def broken() -> None:
        with pre_rotation_keys(list(model.blocks), model.kv_heads, model.head_dim):
            assert hooks() == before + model.layers
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        broken()
    assert hooks() == before
