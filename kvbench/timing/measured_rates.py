"""Rates of this machine for time estimates: large square products and a copy."""

from __future__ import annotations

import torch

from kvbench.timing.peak import COPY_BYTES, copy_rate, matrix_rate
from kvbench.timing.plan import Rates

SIDE = 1024


def measured_rates(dtype: str) -> Rates:
    """Measure on this machine's CPU, in under a second."""
    device = torch.device("cpu")
    shape = (SIDE, SIDE, SIDE)
    products = [matrix_rate(shape, "large square", kind, device) for kind in (getattr(torch, dtype), torch.float64)]
    copy = copy_rate(COPY_BYTES[-1], device)
    operations, double = (rate.operations_per_second if rate else 1e9 for rate in products)
    bandwidth = copy.bytes_per_second if copy else 1e9
    rule = (
        f"measured here, CPU, {torch.get_num_threads()} threads: {dtype} {operations / 1e12:.3g} Tflop/s, float64 {double / 1e12:.3g} Tflop/s, "
        f"{bandwidth / 1e9:.3g} GB/s"
    )
    return Rates(operations, double, bandwidth, rule)
