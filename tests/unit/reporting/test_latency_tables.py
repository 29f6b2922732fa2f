"""Tables and figures of latency.json: errors are shown as errors, missing parts are left out, every figure says its conditions."""

from __future__ import annotations

import pytest

from kvbench.reporting.latency_figures import latency_only_figures
from kvbench.reporting.latency_rows import first_token_table, frames, tables
from kvbench.runs.latency import EndedLength, Latency, LatencyPoint, PhaseTime, QualityPoint


def _point(arm: str, tokens: int, seconds: float, *, cold: bool = False, error: str | None = None) -> LatencyPoint:
    repeats = (0.9 * seconds, seconds, 1.1 * seconds)
    return LatencyPoint(arm=arm, tokens=tokens, p50_seconds=seconds, p95_seconds=1.1 * seconds, seconds=repeats, cold=cold, error=error, achieved=0.5)


@pytest.fixture
def found() -> Latency:
    points = []
    for tokens in (64, 1024):
        own = tokens / 1000
        points += [_point("re-prefill", tokens, own), _point("ridge", tokens, 0.08), _point("ridge", tokens, 0.08 + own / 2, cold=True)]
    points.append(_point("re-prefill, vllm", 1024, 0.001, error="0.001 s is below the floor"))
    phases = [
        PhaseTime(name=name, arm=arm, tokens=tokens, seconds=(s,), p50_seconds=s, p95_seconds=s, p99_seconds=s, achieved=0.25)
        for tokens in (64, 1024)
        for name, arm, s in (("source prefill", None, 0.01), ("map", "ridge", 0.02), ("first token", "ridge", 0.03))
    ]
    return Latency(
        device="made-up card", dtype="bfloat16", threads=2, attention="sdpa", points=tuple(points), phases=tuple(phases), source="small", target="large",
        settings={"warmups": 1, "repeats": 3}, ended=(EndedLength(tokens=4096, batch=1, phase="re-prefill", reason="out of memory"),),
        quality=(
            QualityPoint(label="ridge", arm="ridge", hold_back=1, tokens=1024, warm_seconds=0.08, kl_nats=0.01, top1_agreement=0.9, pareto=True),
            QualityPoint(label="re-prefill", arm="re-prefill", tokens=1024, warm_seconds=1.0, kl_nats=0.0, top1_agreement=1.0, pareto=True),
        ),
    )  # fmt: skip


def test_the_table_has_both_speedups_and_marks_errors(found):
    table = first_token_table(found)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert rows["1,024"]["speed-up warm"].startswith("12.80x [")
    assert rows["64"]["speed-up warm"].startswith("0.80x [")
    # Cold: 1.024 s over 0.08 + 0.512 s.
    assert rows["1,024"]["speed-up cold"].startswith("1.73x [")
    assert rows["1,024"]["re-prefill, vllm ms"] == "ERROR 1.00"
    assert rows["64"]["re-prefill, vllm ms"] == "-"
    assert "made-up card, bfloat16, 2 threads, attention sdpa" in table.notes[0]
    assert "ridge is faster than re-prefill: warm from 1,024 tokens, cold from 1,024 tokens." in table.notes
    assert "4,096 tokens x 1 ended at 're-prefill': out of memory" in table.notes


def test_errors_are_no_speedups_and_not_drawn(found):
    assert found.speedup("ridge", 1024, cold=False, baseline="re-prefill, vllm") is None
    figure = next(f for f in latency_only_figures(found) if f.name == "latency")
    assert "re-prefill, vllm" not in set(figure.data["series"])


def test_every_figure_and_frame_says_its_conditions(found):
    figures = latency_only_figures(found)
    assert [f.name for f in figures] == ["latency", "speedup", "latency_parts", "quality_latency"]
    assert all("made-up card, bfloat16, 2 threads, attention sdpa" in f.caption for f in figures)
    for frame in frames(found).values():
        assert set(frame["device"]) == {"made-up card"}


def test_nothing_measured_is_no_figure():
    empty = Latency(device="made-up card", points=(), ended=(EndedLength(tokens=64, batch=1, phase="re-prefill", reason="out of memory"),))
    assert latency_only_figures(empty) == []
    assert tables(empty) == []
