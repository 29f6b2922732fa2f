"""Block-wise content against the whole, and the Triton kernel under its interpreter against the plain path."""

from __future__ import annotations

import importlib.util
import math
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
    at_most = max(1, rows // 2)
    step = math.ceil(7 / math.ceil(7 / at_most))  # as few blocks as fit, of equal size
    assert [first for first, _ in blocks] == list(range(0, 7, step))
    for layer in range(3):
        # The same float32 operations on the same numbers: equal to the bit.
        assert torch.equal(torch.cat([b.keys[layer] for _, b in blocks], dim=1), whole.keys[layer])
        assert torch.equal(torch.cat([b.values[layer] for _, b in blocks], dim=1), whole.values[layer])
    assert torch.equal(torch.cat([b.positions for _, b in blocks], dim=1), whole.positions)
    assert torch.equal(torch.stack([b.lengths for _, b in blocks]).sum(0), whole.lengths)


def test_forgotten_layers_are_made_again(tiny):
    """In another dtype than the cache's, layers are kept one by one."""
    model = tiny(layers=3)
    _, block = next(token_blocks(model.prefill(ROWS), model.rope, strip=True))
    before = block.flat(1, "k", torch.float64)
    assert block.flat(1, "k", torch.float64) is before
    block.forget([1])
    again = block.flat(1, "k", torch.float64)
    assert again is not before
    assert torch.equal(again, before)


@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("layers", [[0], [1, 2], [0, 2], [0, 1, 3], [3, 1]])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_design_matrices_are_layers_side_by_side(tiny, strip, layers, kind):
    model = tiny(layers=4)
    kv = model.prefill(ROWS)
    whole = to_content(kv, model.rope, strip=strip)
    found = []
    for _, block in token_blocks(kv, model.rope, strip=strip, rows=6):
        design = block.design(layers, kind, torch.float32, torch.device("cpu"))
        assert torch.equal(design[:, : block.kv_heads * block.head_dim], block.flat(layers[0], kind, torch.float32))
        found.append(design.reshape(block.batch, block.tokens, -1).clone())
        # Memory of one block serves the next: what was cloned above must not change, and what comes must not be stale.
        block.release((kind,))
    slow = torch.cat([whole.layer(layer, kind).flatten(2) for layer in layers], dim=2)
    assert torch.equal(torch.cat(found, dim=1), slow)


def test_neighbouring_layers_are_one_matrix_without_a_copy(tiny):
    model = tiny(layers=4)
    _, block = next(token_blocks(model.prefill(ROWS), model.rope, strip=True))
    design = block.design([1, 2], "k", torch.float32, torch.device("cpu"))
    assert design.data_ptr() == block.flat(1, "k", torch.float32).data_ptr()
    assert block.design([0, 2], "k", torch.float32, torch.device("cpu")).data_ptr() != block.flat(0, "k", torch.float32).data_ptr()


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
