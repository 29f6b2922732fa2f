from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "runs"))


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished made-up run with six arms, five tasks, a pooled group and all extras; read-only."""
    from made_runs import make_run

    return make_run(tmp_path_factory.mktemp("runs") / "full").path


@pytest.fixture(scope="session")
def full_report(full_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of that run."""
    from kvbench.reporting import compare, write_report
    from kvbench.runs import load_runs

    out = tmp_path_factory.mktemp("reports") / "full"
    write_report(compare(load_runs(full_run)), out)
    return out
