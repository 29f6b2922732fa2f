from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from lm_eval_samples import choice_samples, write_lm_eval_folder
from made_runs import make_run
from typer.testing import CliRunner

from kvbench.cli.report import report
from kvbench.errors import BadInputError
from kvbench.reporting import Comparison, Policy, compare, write_report
from kvbench.runs import load_frame, load_runs

FIGURES = ("retention", "against_source", "flips", "r2_0", "cosine", "sweep", "latency", "accuracy_latency", "handoff_f1", "handoff_drift")


def test_all_files_are_there_and_sums_hold(full_report: Path) -> None:
    for name in ("report.html", "report.md", "comparison.json", "arms.json"):
        assert (full_report / name).stat().st_size > 1000
    for name in FIGURES:
        svg, png = (full_report / "figures" / f"{name}{end}" for end in (".svg", ".png"))
        assert "<svg" in svg.read_text()
        width, height = struct.unpack(">II", png.read_bytes()[16:24])
        assert width > 600
        assert height > 200
        assert len(pd.read_csv(full_report / "figures" / f"{name}.csv")) > 0
    for line in (full_report / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((full_report / name).read_bytes()).hexdigest() == digest


def test_comparison_json_is_the_whole_comparison(full_report: Path, full_run: Path) -> None:
    stored = Comparison.model_validate_json((full_report / "comparison.json").read_text())
    assert stored == compare(load_runs(full_run)).comparison
    assert stored.version == 1


def test_arms_json_lets_others_recompute(full_report: Path) -> None:
    arms = json.loads((full_report / "arms.json").read_text())
    comparison = Comparison.model_validate_json((full_report / "comparison.json").read_text())
    assert arms["reference"] == "target"
    assert {len(task["scores"][arm]) for task in arms["tasks"] for arm in task["scores"]} == {task.n for task in comparison.tasks}
    for task in arms["tasks"]:
        pair = comparison.pair(f"{task['task']}|{task['filter']}|{task['metric']}", "ridge", "target")
        assert pair is not None
        gap = np.array(task["scores"]["ridge"]) - np.array(task["scores"]["target"])
        expected = gap.sum() / np.sum(task["sizes"]) if task["sizes"] else gap.mean()
        assert pair.difference.value == pytest.approx(expected, abs=1e-12)


def test_tables_hold_the_unrounded_numbers(full_report: Path) -> None:
    comparison = Comparison.model_validate_json((full_report / "comparison.json").read_text())
    pairs = pd.read_csv(full_report / "tables" / "pairs.csv")
    assert len(pairs) == len(comparison.pairs)
    assert pairs["p"].to_list() == pytest.approx([float("nan") if pair.p is None else pair.p for pair in comparison.pairs], nan_ok=True)
    assert set(pairs["disposition"]) <= {"improved", "no material loss", "degraded", "inconclusive"}
    assert len(pd.read_csv(full_report / "tables" / "scores.csv")) == len(comparison.scores)
    assert list(pd.read_csv(full_report / "tables" / "verdicts.csv")["arm"]) == ["ridge", "head_local"]


def test_the_page_names_nothing_outside_itself(full_report: Path) -> None:
    page = (full_report / "report.html").read_text()
    assert set(re.findall(r"https?://[^\"'\s<)]+", page)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_verdict_stands_before_everything_else(full_report: Path) -> None:
    for name in ("report.html", "report.md"):
        text = (full_report / name).read_text()
        first = text.index("mapped is no better than the source model")
        assert first < text.lower().index("do not deploy") < text.index("ridge keeps") < text.index("Scores")


def test_sections_without_data_say_what_fills_them(tmp_path: Path) -> None:
    make_run(tmp_path / "run", scale=0.1, extras=False)
    page = write_report(compare(load_runs(tmp_path / "run"), Policy(resamples=1000)), tmp_path / "out").read_text()
    for command in ("kvbench diagnose", "kvbench sweep", "kvbench latency", "kvbench handoff"):
        assert f"Fill this section with <code>{command}" in page
    assert not (tmp_path / "out" / "figures" / "handoff_drift.svg").exists()


def test_text_of_items_cannot_break_the_page(tmp_path: Path) -> None:
    samples = choice_samples("c", 40, 0.9, "a")
    evil = "</script><script>alert(1)</script> <!-- $x_1$ $y$ \u2028"
    for sample in samples:
        sample["arguments"] = [(evil, choice) for _, choice in sample["arguments"]]
    other = [dict(sample, acc=0.0, acc_norm=0.0) for sample in samples]
    runs = load_runs(write_lm_eval_folder(tmp_path / "$a$<b>", {"c": samples})) + load_runs(write_lm_eval_folder(tmp_path / "$b$", {"c": other}))
    page = write_report(compare(runs, Policy(resamples=1000)), tmp_path / "out").read_text()
    assert "alert(1)</script>" not in page
    assert "<b>" not in page.replace("<b>Prompt", "").split("<script")[0].split("</h1>")[0]
    assert (tmp_path / "out" / "report.md").read_text().count("<b>") == 0


def test_the_same_runs_give_the_same_bytes(tmp_path: Path, full_run: Path) -> None:
    compared = compare(load_runs(full_run), Policy(resamples=1000))
    for name in ("a", "b"):
        write_report(compared, tmp_path / name)
    assert (tmp_path / "a" / "SHA256SUMS").read_text() == (tmp_path / "b" / "SHA256SUMS").read_text()


def run_command(*arguments: str) -> tuple[int, str, str, BaseException | None]:
    app = typer.Typer()
    app.command()(report)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr, done.exception


def test_the_command_prints_the_verdict_and_writes_the_report(tmp_path: Path, full_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    arguments = [str(full_run), "--out", str(out), "--resamples", "1000", "--margin", "0.05", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", ["kvbench", "report", *arguments])
    code, stdout, stderr, _ = run_command(*arguments)
    assert code == 0
    assert stdout.startswith("head_local: mapped is no better than the source model")
    assert "\nridge: inconclusive. ridge keeps " in stdout  # degraded at a margin of 0.02, but not beyond 0.05
    assert stderr == f"report: {out / 'report.html'}\n"
    page = (out / "report.html").read_text()
    assert f"kvbench report {full_run} --out {out} --resamples 1000 --margin 0.05 --seed 3" in page
    stored = Comparison.model_validate_json((out / "comparison.json").read_text())
    assert stored.policy.margin == 0.05
    assert stored.provenance is not None

    code, _, _, error = run_command(str(full_run), "--out", str(out))
    assert code != 0
    assert isinstance(error, BadInputError)
    assert "exists already" in str(error)


def test_the_command_prints_json(tmp_path: Path, full_run: Path) -> None:
    code, stdout, _, _ = run_command(str(full_run), "--out", str(tmp_path / "out"), "--resamples", "1000", "--json", "--arms", "target,ridge")
    assert code == 0
    assert Comparison.model_validate_json(stdout).mappers == ("ridge",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--margin", "-1"], "--margin is -1.0: Input should be greater than or equal to 0"),
        (["--level", "95"], "--level is 95.0: Input should be less than 1"),
        (["--resamples", "10"], "--resamples is 10"),
        (["--tasks", "nosuch"], "there is no task 'nosuch'"),
        (["--reference", "nosuch"], "there is no arm 'nosuch'"),
    ],
)
def test_bad_options_are_one_clear_message(tmp_path: Path, full_run: Path, arguments: list[str], message: str) -> None:
    code, _, _, error = run_command(str(full_run), "--out", str(tmp_path / "out"), *arguments)
    assert code != 0
    assert isinstance(error, BadInputError)
    assert message in str(error)
    assert not (tmp_path / "out").exists()


def test_reporting_imports_no_torch() -> None:
    code = "import sys, kvbench.reporting, kvbench.runs, kvbench.reporting.html; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_a_report_without_prompts_carries_no_words_of_the_data(tmp_path: Path) -> None:
    make_run(tmp_path / "run", extras=False)
    compared = compare(load_runs(tmp_path / "run"), Policy(resamples=1000))
    write_report(compared, tmp_path / "with")
    write_report(compared, tmp_path / "without", prompts=False)
    words = str(load_frame(tmp_path / "run").prompt.iloc[0])[:12]

    def everything(folder: Path) -> str:
        texts = (p for p in sorted(folder.rglob("*")) if p.suffix in {".html", ".md", ".json", ".csv", ".svg"})
        return "".join(p.read_text(encoding="utf-8") for p in texts)

    assert words in everything(tmp_path / "with")
    assert words not in everything(tmp_path / "without")
