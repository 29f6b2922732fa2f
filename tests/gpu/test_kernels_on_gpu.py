"""The Triton kernel on a GPU, against the plain path there."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def test_kernel_equals_the_plain_path():
    script = Path(__file__).parents[1] / "unit" / "kv" / "triton_cases.py"
    done = subprocess.run([sys.executable, str(script), "cuda"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("cases equal")
