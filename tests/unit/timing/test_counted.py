"""Counted work against the operations that torch itself counts, and floors against made-up machines."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvbench.mappers.controls import Raw
from kvbench.runs.latency import CopyRate, MatrixRate
from kvbench.timing import counted
from kvbench.timing.counted import Work
from kvbench.timing.peak import Machine
from kvbench.timing.points import judged_point, unsteady


def machine(operations: float = 1e9, bandwidth: float = 1e9) -> Machine:
    made = Machine(torch.float32, torch.device("cpu"))
    made.matrix = {(1, 1, 1): MatrixRate(shape=(1, 1, 1), what="made up", operations_per_second=operations)}
    made.copies = (CopyRate(buffer_bytes=1 << 30, bytes_per_second=bandwidth),)
    return made


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_prefill_operations_are_those_torch_counts(tiny, kind):
    model = tiny(layers=3, kind=kind, attention="eager")
    ids = torch.randint(0, 50, (2, 40))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.decoder(input_ids=ids, use_cache=False)
    size = counted.size_of(model)
    # Eager attention also multiplies what the causal mask hides: 40 * 40 pairs instead of 40 * 41 / 2.
    hidden = 4 * size.layers * size.query_width * 2 * (40 * 40 - 40 * 41 // 2)
    # The rotary angles are a product too, of no account.
    assert counter.get_total_flops() == pytest.approx(counted.prefill(size, 40, 2).operations + hidden, rel=1e-2)


def test_pieces_add_up_to_the_whole(tiny):
    size = counted.size_of(tiny())
    whole = counted.prefill(size, 30, 1).operations
    assert counted.prefill(size, 20, 1).operations + counted.prefill(size, 10, 1, behind=20).operations == whole
    assert counted.prefill(size, 30, 4).operations == 4 * whole
    head = counted.prefill(size, 30, 1, head_positions=1)
    assert head.operations - whole == 2 * size.head_parameters
    assert head.bytes_moved - counted.prefill(size, 30, 1).bytes_moved == 4 * size.head_parameters


def test_a_control_has_no_products_but_moves_bytes(tiny):
    source, target = tiny(layers=2), tiny(layers=3)
    sizes = counted.size_of(source), counted.size_of(target)
    work = counted.transferring(Raw(3), *sizes, 16, 2)
    # 16 tokens, 2 rows, 2 kinds, 2 heads of 8, float32: 2 layers read, 3 written.
    assert work == Work(0, 16 * 2 * 2 * (2 + 3) * 16 * 4)


def test_floor_is_the_larger_of_both():
    made = machine(operations=1e9, bandwidth=1e6)
    assert made.floor(Work(int(2e9), 10)) == pytest.approx(2.0)
    assert made.floor(Work(10, int(3e6))) == pytest.approx(3.0)
    assert made.compute_floor(Work(10, int(3e6))) == pytest.approx(1e-8)


def test_small_buffers_move_at_the_rate_of_small_copies():
    made = machine()
    made.copies = (CopyRate(buffer_bytes=100, bytes_per_second=1e9), CopyRate(buffer_bytes=1000, bytes_per_second=1e6))
    assert [made.bandwidth(size) for size in (50, 100, 500, 5000)] == [1e9, 1e9, 1e6, 1e6]


def test_a_time_below_the_compute_floor_is_an_error():
    work = Work(int(1e9), int(1e10))
    point = judged_point("re-prefill, fast", 64, 1, (0.5, 0.6, 0.7), work, machine())
    assert point.error is not None
    assert "below the floor of 1e+03 ms" in point.error
    assert point.floor_seconds == pytest.approx(10.0)
    # Slower than the products, faster than the assumed bandwidth: caches may do that, so it is no error.
    assert judged_point("re-prefill", 64, 1, (1.5,), work, machine()).error is None


def test_repeats_that_differ_too_much_are_told():
    work = Work(1, 1)
    steady, shaky = (judged_point("m", n, 1, seconds, work, machine()) for n, seconds in ((64, (1.0, 1.2, 1.9)), (1024, (1.0, 1.1, 2.0))))
    assert unsteady([steady]) == []
    assert "at 1,024 tokens" in unsteady([steady, shaky])[0]
