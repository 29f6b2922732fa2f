"""Block-wise content against the whole, and the Triton kernel under its interpreter against the plain path."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbench.kv.capture import to_content
from kvbench.kv.kernels import token_blocks

ROWS = [[1, 5, 9, 13, 17, 21, 25], [2, 4, 8]]


@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 6, 100])
def test_blocks_joined_are_the_whole_content(tiny, strip, rows):
    model = tiny(layers=3)
    kv = model.prefill(ROWS)
    whole = to_content(kv, model.rope, strip=strip)
    blocks = list(token_blocks(kv, model.rope, strip=strip, rows=rows))
    assert [first for first, _ in blocks] == list(range(0, 7, max(1, rows // 2)))
    for layer in range(3):
        # The same float32 operations on the same numbers: equal to the bit.
        assert torch.equal(torch.cat([b.keys[layer] for _, b in blocks], dim=1), whole.keys[layer])
        assert torch.equal(torch.cat([b.values[layer] for _, b in blocks], dim=1), whole.values[layer])
    assert torch.equal(torch.cat([b.positions for _, b in blocks], dim=1), whole.positions)
    assert torch.equal(torch.stack([b.lengths for _, b in blocks]).sum(0), whole.lengths)


def test_forgotten_layers_are_made_again(tiny):
    model = tiny(layers=3)
    _, block = next(token_blocks(model.prefill(ROWS), model.rope, strip=True))
    before = block.flat(1, "k", torch.float32)
    assert block.flat(1, "k", torch.float32) is before
    block.forget([1])
    again = block.flat(1, "k", torch.float32)
    assert again is not before
    assert torch.equal(again, before)


def test_apply_into_is_apply_then_copy(tiny):
    model = tiny(layers=2)
    cos, sin = model.rope.cos_sin(torch.arange(5)[None])
    keys = torch.randn(2, 5, model.kv_heads, model.head_dim).bfloat16()
    cache = torch.zeros(2, model.kv_heads, 9, model.head_dim, dtype=torch.bfloat16)
    model.rope.apply_into(keys, cos, sin, cache[:, :, 2:7])
    assert torch.equal(cache[:, :, 2:7], model.rope.apply(keys, cos, sin).transpose(1, 2).bfloat16())
    assert not cache[:, :, :2].any()
    assert not cache[:, :, 7:].any()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_equals_the_plain_path_under_the_interpreter():
    """In a process of its own: the interpreter is chosen when triton is imported."""
    script = Path(__file__).with_name("triton_cases.py")
    done = subprocess.run(
        [sys.executable, str(script), "cpu"], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("cases equal")
