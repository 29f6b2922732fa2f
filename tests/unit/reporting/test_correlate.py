"""Correlations of planted diagnostic figures with what made-up runs keep."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from lm_eval_samples import choice_samples, prefix_samples
from scipy import stats as scipy_stats

from kvbench.errors import BadInputError
from kvbench.reporting.correlate import AVERAGE, Correlations, correlate, correlations_frame, points_frame
from kvbench.reporting.correlate_figures import correlation_figures
from kvbench.runs import ArmSpec, ModelSpec, Provenance, RunSpec, RunStore, TaskSpec, rows_from_lm_eval
from kvbench.runs.files import write_stored
from kvbench.runs.measured import DiagnosticFigure, Diagnostics, LayerDiagnostics

LEVELS = {"target": 0.8, "m1": 0.78, "m2": 0.7, "m3": 0.6, "m4": 0.5, "m5": 0.4, "zero": 0.25}


def _run(path: Path, source: str, *, nll: bool = False) -> Path:
    roles = {"target": "target", "zero": "control"}
    arms = tuple(ArmSpec(name=a, role=roles.get(a, "mapper"), mapper=None if a == "target" else f"out/{a}") for a in LEVELS)  # type: ignore[arg-type]
    tasks = ["choice_made", "other_made", *(["wiki_made"] if nll else [])]
    store = RunStore.create(
        path, RunSpec(source=ModelSpec(name=source), target=ModelSpec(name="big"), arms=arms, tasks=tuple(TaskSpec(name=t) for t in tasks))
    )
    for arm, level in LEVELS.items():
        samples = {"choice_made": choice_samples("choice_made", 120, level, arm), "other_made": choice_samples("other_made", 80, 0.9 * level, arm)}
        if nll:
            samples["wiki_made"] = prefix_samples("wiki_made", 30, 3.4 - level, arm)
        for task, rows in samples.items():
            store.write_samples(task, arm, rows_from_lm_eval(rows, task, arm))
    store.finish(Provenance())
    return path


def _diagnose(path: Path, values: dict[str, dict[str, float]], **more: str) -> None:
    entries = tuple(
        LayerDiagnostics(
            arm=arm,
            role="control" if arm == "zero" else "mapper",
            prefix=64,
            figures=tuple(DiagnosticFigure(name=name, value=value, n=8) for name, value in figures.items()),
        )
        for arm, figures in values.items()
    )
    path.mkdir(exist_ok=True)
    write_stored(path / "diagnostics.json", Diagnostics(mappers=entries, **more))  # type: ignore[arg-type]


def _kept(found: Correlations, outcome: str = AVERAGE) -> dict[tuple[str, str], float]:
    return {(p.pair, p.arm): p.outcomes[outcome] for p in found.points}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = _run(tmp_path / "run", "small")
    _diagnose(path, {a: {"top1_agreement": 0.5} for a in LEVELS if a != "target"})
    return path


def test_coefficients_and_intervals_are_those_of_their_definitions(run):
    noise = {"m1": 0.02, "m2": -0.05, "m3": 0.04, "m4": -0.01, "m5": 0.03, "zero": 0.0}
    kept = {arm: value for (_, arm), value in _kept(correlate([run])).items()}
    _diagnose(run, {a: {"top1_agreement": 0.4 + 0.5 * kept[a] + e, "kl_nats": 1 - kept[a]} for a, e in noise.items()})
    found = correlate([run])
    mappers = ["m1", "m2", "m3", "m4", "m5"]
    x, y = np.array([0.4 + 0.5 * kept[a] + noise[a] for a in mappers]), np.array([kept[a] for a in mappers])
    row = found.row("top1_agreement")
    assert row is not None
    r = float(((x - x.mean()) * (y - y.mean())).sum() / math.sqrt(((x - x.mean()) ** 2).sum() * ((y - y.mean()) ** 2).sum()))
    assert row.r.value == pytest.approx(r)
    # Fisher (1921): atanh(r) +- 1.96 / sqrt(n - 3).
    assert row.r.lower == pytest.approx(math.tanh(math.atanh(r) - 1.959964 / math.sqrt(2)), abs=1e-6)
    assert row.r.upper == pytest.approx(math.tanh(math.atanh(r) + 1.959964 / math.sqrt(2)), abs=1e-6)
    assert (row.n, row.pairs) == (5, 1)
    ranks = found.row("top1_agreement", kind="spearman")
    assert ranks is not None
    assert ranks.r.value == pytest.approx(scipy_stats.spearmanr(x, y).statistic)
    everything = found.row("top1_agreement", points="mappers and controls")
    assert everything is not None
    assert everything.n == 6
    exact = found.row("kl_nats")
    assert exact is not None
    assert exact.lower_is_better
    assert exact.r.value == pytest.approx(-1)
    assert exact.r.interval_reason is not None
    assert "perfect" in exact.r.interval_reason


def test_retention_is_the_arms_score_over_the_targets(run):
    point = next(p for p in correlate([run]).points if p.arm == "m3")
    store = RunStore.open(run)
    accuracy = {(task, arm): store.samples([task], [arm])["metric.acc"].mean() for task in ("choice_made", "other_made") for arm in ("m3", "target")}
    for task in ("choice_made", "other_made"):
        assert point.outcomes[task] == pytest.approx(accuracy[task, "m3"] / accuracy[task, "target"])
    assert point.outcomes[AVERAGE] == pytest.approx((point.outcomes["choice_made"] + point.outcomes["other_made"]) / 2)
    assert point.role == "mapper"
    # sqrt(0.25 / 120) is 4.6 points.
    assert any(
        w.startswith("choice_made has 120 items: every score on it carries a standard error of up to 5 percentage points")
        for w in correlate([run]).warnings
    )
    lost = next(p for p in correlate([run], "difference", tasks=["choice_made"]).points if p.arm == "m3")
    assert lost.outcomes["choice_made"] == pytest.approx(accuracy["choice_made", "m3"] - accuracy["choice_made", "target"])


def test_between_and_within_pairs_can_disagree(tmp_path):
    """Within each pair the figure rises with what is kept; the pair that keeps less has the higher figures."""
    paths = [_run(tmp_path / name, name) for name in ("small", "tiny")]
    for path in paths:
        _diagnose(path, {a: {"top1_agreement": 0.5} for a in LEVELS if a != "target"})
    kept = _kept(correlate(paths))
    shift = {"small": 0.0, "tiny": 5.0}
    slope = {"small": 0.3, "tiny": 0.3}
    for path, name in zip(paths, shift, strict=True):
        _diagnose(path, {a: {"top1_agreement": shift[name] + slope[name] * kept[f"{name} -> big", a]} for a in LEVELS if a != "target"})
    found = correlate(paths)
    across, within = found.row("top1_agreement"), found.row("top1_agreement", scope="within pairs")
    assert across is not None
    assert within is not None
    assert within.r.value == pytest.approx(1)
    assert across.r.value is not None
    assert across.r.value < 0.2
    assert (across.n, across.pairs) == (10, 2)
    assert any("not independent" in w for w in found.warnings)
    assert any("fewer points than the paper's 12" in w for w in found.warnings)
    own = found.row("top1_agreement", scope="tiny -> big")
    assert own is not None
    assert own.n == 5
    assert set(points_frame(found)["pair"]) == {"small -> big", "tiny -> big"}
    assert len(correlations_frame(found)) == len(found.rows)
    (figure,) = correlation_figures(found)
    assert figure.png.startswith(b"\x89PNG")
    assert "hollow: controls" in figure.svg
    assert len(figure.data) == 12


def test_nll_and_diagnostics_of_another_directory(tmp_path):
    run = _run(tmp_path / "run", "small", nll=True)
    values = {a: {"nll_difference": 3.4 - level} for a, level in LEVELS.items() if a != "target"}
    _diagnose(tmp_path / "apart", values, source="small", target="big")
    found = correlate([run, tmp_path / "apart"], "nll")
    row = found.row("nll_difference")
    assert row is not None
    assert row.r.value is not None
    assert row.r.value > 0.9
    assert {o for p in found.points for o in p.outcomes} == {"wiki_made", AVERAGE}
    fewer = correlate([run, tmp_path / "apart"], "nll", leave_out=["m5", "zero"])
    assert len(fewer.points) == 4
    assert "left out as asked: m5, zero" in fewer.warnings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"figures": ["luck"]}, "figure 'luck' is unknown"),
        ({"against": "nll"}, "a task scored by negative log-likelihood"),
        ({"leave_out": ["nobody"]}, "no arm 'nobody' to leave out"),
        ({"prefix": 999}, "nothing to correlate"),
    ],
)
def test_mistakes(run, options, message):
    with pytest.raises(BadInputError, match=message):
        correlate([run], **options)


def test_what_is_missing_is_named_with_the_command(tmp_path, run):
    other = _run(tmp_path / "bare", "tiny")
    with pytest.raises(BadInputError, match=r"no diagnostics for .*bare': kvbench diagnose tiny big --mapper m1=out/m1 .*--out .*bare"):
        correlate([run, other])
    with pytest.raises(BadInputError, match="neither a run"):
        correlate([tmp_path])
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    with pytest.raises(BadInputError, match="is a sweep"):
        correlate([run, tmp_path / "sweep"])
    _diagnose(run, {a: {"top1_agreement": LEVELS[a]} for a in ("m1", "m2", "m3", "m4")})
    assert any("no diagnostics of m5, zero; left out" in w for w in correlate([run]).warnings)


def test_the_command_writes_it_all_without_torch(run, run_cli, tmp_path):
    done = run_cli("correlate", run, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names >= {"correlation.json", "correlations.csv", "points.csv", "scatter_top1_agreement.png", "SHA256SUMS"}
    stored = json.loads((tmp_path / "out" / "correlation.json").read_text())
    assert stored == json.loads(done.stdout)
    assert stored["format"] == "kvbench-correlation"
    table = run_cli("correlate", run)
    assert "top1_agreement" in table.stdout
    assert "5 mapper points from 1 ordered pairs, 1 control points" in table.stderr
    wrong = run_cli("correlate", run, "--against", "hope")
    assert wrong.returncode == 2
    assert "it is one of retention, difference, nll" in wrong.stderr
