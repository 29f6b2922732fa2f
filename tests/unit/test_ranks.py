"""What one process can show of the work of several; two real processes are in tests/integration/test_distributed.py."""

from __future__ import annotations

import pytest
import torch

from kvbench import ranks
from kvbench.errors import BadInputError
from kvbench.ranks import ALONE, OtherProcessError, Ranks


class Pretended(Ranks):
    """Process 0 of two, whose partner answers what it is told to."""

    partner: object = None

    def gather(self, value):
        return [value, self.partner]


def test_alone_everything_is_what_it_is():
    assert ALONE.main
    assert ALONE.gather(3) == [3]
    assert ALONE.broadcast("x") == "x"
    assert ALONE.on_main(lambda: 4) == 4
    assert ALONE.together(lambda: 5) == 5
    assert list(ALONE.share([1, 2, 3], lambda i: i * i)) == [(1, 1), (2, 4), (3, 9)]
    ALONE.agree("anything", "text")
    assert ALONE.device("cuda") == "cuda"
    tensor = torch.ones(2)
    ALONE.add(tensor)
    assert tensor.tolist() == [1, 1]


def test_errors_alone_keep_their_own_traceback():
    def fail(_: int) -> int:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        list(ALONE.share([1], fail))


def test_turns_go_round_and_come_back_in_order():
    pair = Pretended(0, 2)
    object.__setattr__(pair, "partner", ("theirs", None))
    assert list(pair.share(["a", "b", "c"], lambda item: f"mine {item}")) == [("a", "mine a"), ("b", "theirs"), ("c", "mine c")]


def test_a_failure_elsewhere_stops_this_process_too():
    pair = Pretended(0, 2)
    object.__setattr__(pair, "partner", (None, (1, False, "no text")))
    with pytest.raises(OtherProcessError, match="process 1 failed: no text"):
        list(pair.share(["a", "b"], str))
    object.__setattr__(pair, "partner", (None, (1, True, "CUDA out of memory")))
    # All halve their batches together.
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        list(pair.share(["a", "b"], str))
    object.__setattr__(pair, "partner", (1, False, "full disk"))
    with pytest.raises(OtherProcessError, match="process 1 failed: full disk"):
        pair.together(lambda: None)
    object.__setattr__(pair, "partner", "another digest")
    with pytest.raises(BadInputError, match="process 1 has another pair than process 0"):
        pair.agree("pair", "text")


def test_devices_and_the_environment(monkeypatch):
    assert Ranks(3, 4, 1).device("cuda") == "cuda:1"
    assert Ranks(3, 4, 1).device("cpu") == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    assert ranks.processes() == 1  # a cluster sets WORLD_SIZE for all jobs; a launcher sets RANK too
    monkeypatch.setenv("RANK", "2")
    assert ranks.processes() == 4
    assert not ranks.is_main()
    with pytest.raises(BadInputError, match="each takes its own"):
        ranks.join("cuda:0")
    with pytest.raises(BadInputError, match="--device-map auto spreads one process over all devices"):
        ranks.join("cuda", "auto")
    monkeypatch.setenv("RANK", "0")
    assert ranks.is_main()
