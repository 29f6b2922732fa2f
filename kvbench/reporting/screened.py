"""How a screen's verdict is shown: the criteria with their figures, bounds and thresholds, the stages, the policy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from kvbench.reporting.numbers import signed
from kvbench.runs.verdict import Criterion, Verdict

MARK = {True: "pass", False: "FAIL", None: "open"}
TONE = {True: "good", False: "bad", None: "open"}
BADGE = {"deploy": "good", "do-not-deploy": "bad", "inconclusive": "open"}


class CriterionRow(NamedTuple):
    """One criterion, ready to print."""

    outcome: str
    tone: str
    what: str
    figure: str
    interval: str
    wanted: str
    n: str
    reason: str
    required: bool
    warns: bool
    told: str
    stage: str


def rows(verdict: Verdict) -> list[CriterionRow]:
    """All criteria, the required ones first, failed before open before passed."""
    rank = {False: 0, None: 1, True: 2}
    ordered = sorted(verdict.criteria, key=lambda c: (not c.required, rank[c.passed]))
    return [_row(c) for c in ordered]


def _row(c: Criterion) -> CriterionRow:
    fact = c.id.startswith(("check", "gain"))
    both = c.bound is not None and c.other_bound is not None
    low, high = (min(c.bound, c.other_bound), max(c.bound, c.other_bound)) if c.bound is not None and c.other_bound is not None else (0.0, 0.0)
    # A speed-up that the policy does not ask for is reported and neither passes nor warns.
    reported = c.id.startswith("speed.") and not c.required and c.figure is not None
    outcome = (
        "reported"
        if reported
        else MARK[c.passed]
        if c.required
        else {True: "ok", False: "warning", None: "unclear" if c.figure is not None else "no data"}[c.passed]
    )
    return CriterionRow(
        outcome=outcome,
        tone="" if reported else TONE[c.passed],
        what=c.what,
        figure="" if fact else "none" if c.figure is None else number(c.figure, c.unit),
        interval=f"{number(low, c.unit)} to {number(high, c.unit)}" if both else "",
        wanted="" if fact else "not required" if reported else f"{c.relation} {number(c.threshold, c.unit)}",
        n="" if c.n is None else f"{c.n:,}",
        reason=c.reason,
        required=c.required,
        warns=not c.required and not reported,
        told=c.reason if c.figure is None or "too near zero" in c.reason else "",
        stage=c.stage,
    )


def number(value: float, unit: str) -> str:
    """A figure in the unit of its criterion."""
    if unit == "%":
        return signed(f"{100 * value:.1f} %")
    if unit == "pp":
        return "0 pp" if value == 0 else signed(f"{100 * value:+.1f} pp")
    if unit == "x":
        return f"{value:.2f}\u00d7"
    # What stands behind a comma describes the figure; in a table it only takes room.
    short = "" if "relative error" in unit else unit.partition(",")[0].partition(" lost")[0].replace("nats per token", "nats/token")
    return signed(f"{value:.3g}") + (f" {short}" if short else "")


def policy_yaml(verdict: Verdict) -> str:
    """The policy as YAML."""
    return yaml.safe_dump(verdict.policy, sort_keys=False, allow_unicode=True)


def markdown(verdict: Verdict) -> str:
    """Verdict, criteria, stages and policy as Markdown."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

    lines = [f"### Screen: {verdict.verdict}", "", cell(verdict.sentence), ""]
    lines += ["| outcome | criterion | figure | interval | wanted | n |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {r.outcome} | {cell(r.what)} | {r.figure} | {r.interval} | {r.wanted} | {r.n} |" for r in rows(verdict)]
    lines += ["", "| stage | state | seconds | |", "| --- | --- | --- | --- |"]
    lines += [f"| {s.name} | {s.state} | {'' if s.seconds is None else f'{s.seconds:.1f}'} | {cell(s.note)} |" for s in verdict.stages]
    lines += [
        "",
        f"Policy '{verdict.policy_name}', SHA-256 {verdict.policy_fingerprint}, budget {verdict.budget}:",
        "",
        "```yaml",
        policy_yaml(verdict).rstrip(),
        "```",
    ]
    return "\n".join(lines)


def write_verdict_page(verdict: Verdict, out: Path, *, overwrite: bool = False) -> Path:
    """A report of a screen that ended before anything was compared: report.html and report.md.

    Args:
        verdict: what was decided.
        out: directory to write.
        overwrite: replace an existing one.

    Returns:
        The page.
    """
    from kvbench.reporting.html import verdict_html
    from kvbench.storage import atomic_directory

    title = f"{verdict.signature.source.name} \u2192 {verdict.signature.target.name}"
    with atomic_directory(out, overwrite=overwrite) as directory:
        (directory / "report.html").write_text(verdict_html(verdict, title), encoding="utf-8")
        (directory / "report.md").write_text(f"## {title}\n\n{markdown(verdict)}\n", encoding="utf-8")
    return out / "report.html"
