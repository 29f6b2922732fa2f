from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    # statsmodels' Holm collects garbage at every call: set aside what pytest holds, or thousands of calls take minutes.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
