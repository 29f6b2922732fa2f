"""The report as one self-contained HTML file: opens from disk, asks nothing of the network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from kvbench.reporting import numbers, screened
from kvbench.reporting.comparison import Compared
from kvbench.reporting.export import page_items
from kvbench.reporting.latency_rows import PlainTable, tables
from kvbench.reporting.plots import PALETTE, Figure
from kvbench.reporting.rows import MARKS, average_line, headline, matrix, pair_rows
from kvbench.reporting.view import Comparison, Relation, VerdictView
from kvbench.runs.verdict import Verdict

if TYPE_CHECKING:
    from jinja2 import Environment

_SECTIONS = (
    (
        "diagnostics",
        "Layer by layer",
        "kvbench diagnose SOURCE TARGET --mapper DIR --out RUN",
        "how well each layer is predicted, and where attention reads the error",
    ),
    ("sweep", "Sweeps", "kvbench sweep MOMENTS --recipe ridge --grid k=1,2,4 --out RUN", "how the score moves with k, lambda or calibration size"),
    ("latency", "Latency", "kvbench latency SOURCE TARGET --mapper DIR --out RUN", "what the transfer saves, warm and cold"),
    (
        "handoff",
        "Handoff over turns",
        "kvbench handoff SOURCE TARGET --mapper DIR --out RUN",
        "whether answers drift with the turns of a conversation",
    ),
)


class Figures(NamedTuple):
    """One optional section of the page."""

    key: str
    title: str
    command: str
    what: str
    figures: Sequence[Figure]
    tables: Sequence[PlainTable] = ()


class Card(NamedTuple):
    """One verdict of the page."""

    verdict: VerdictView
    colour: str
    numbers: Sequence[tuple[str, str, str]]


def html(compared: Compared, figures: Mapping[str, Sequence[Figure]], *, prompts: bool = True) -> str:
    """Render the page.

    Args:
        compared: the comparison and its items.
        figures: from `figures.all_figures`.
        prompts: include the items' texts.
    """
    comparison = compared.comparison
    items = page_items(compared, prompts=prompts)
    relations: dict[Relation, list[object]] = {}
    for relation in ("target", "source", "zero", "mapper", "context"):
        relations[relation] = list(pair_rows(comparison, relation))
    return _environment().get_template("report.html").render(
        c=comparison,
        headline=headline(comparison),
        cards=[_card(comparison, verdict, f"var(--c{i % len(PALETTE)})") for i, verdict in enumerate(comparison.verdicts)],
        matrix=matrix(comparison),
        average=average_line(comparison),
        marks=MARKS,
        rows=relations,
        further=[row for relation in ("target", "source", "zero", "mapper") for row in pair_rows(comparison, relation, primary=False)],
        figures=figures,
        sections=[Figures(key, title, command, what, figures.get(key, ()), _tables(comparison, key)) for key, title, command, what in _SECTIONS],
        margin=numbers.margin(comparison.policy),
        level=f"{comparison.policy.level * 100:.4g} %",
        items=_script_json(items),
        omitted=items["omitted"],
        style=_text("report.css"),
        screen_rows=screened.rows(comparison.screen) if comparison.screen is not None else [],
        screen_badge=screened.BADGE[comparison.screen.verdict] if comparison.screen is not None else "",
        screen_policy=screened.policy_yaml(comparison.screen) if comparison.screen is not None else "",
        script=_text("report.js"),
    )  # fmt: skip


def _tables(comparison: Comparison, key: str) -> list[PlainTable]:
    """Tables of an optional section."""
    return [table for extras in comparison.extras if key == "latency" and extras.latency is not None for table in tables(extras.latency)]


def verdict_html(verdict: Verdict, title: str) -> str:
    """The page of a screen that ended before anything was compared."""
    return (
        _environment()
        .get_template("verdict.html")
        .render(
            v=verdict,
            title=title,
            rows=screened.rows(verdict),
            badge=screened.BADGE[verdict.verdict],
            policy=screened.policy_yaml(verdict),
            style=_text("report.css"),
        )
    )


def _card(comparison: Comparison, verdict: VerdictView, colour: str) -> Card:
    figures: list[tuple[str, str, str]] = []
    average = comparison.average(verdict.arm, comparison.reference_arm)
    if average is not None:
        figures.append((f"of {comparison.reference_arm} kept", numbers.ratio(average.retention.value), numbers.ratio_interval(average.retention)))
        if average.floor_normalised.value is not None:
            figures.append(("kept above chance", numbers.ratio(average.floor_normalised.value), numbers.ratio_interval(average.floor_normalised)))
    for reference, words in ((comparison.source_arm, "against {} alone"), (comparison.zero_arm, "against {} cache")):
        found = comparison.average(verdict.arm, reference) if reference else None
        if reference and found is not None and found.difference.value is not None:
            estimate = found.difference
            bounds = ""
            if estimate.lower is not None and estimate.upper is not None:
                bounds = f"{numbers.points(estimate.lower).removesuffix(' pp')} to {numbers.points(estimate.upper).removesuffix(' pp')}"
            figures.append((words.format(reference), numbers.points(found.difference.value), bounds))
    return Card(verdict, colour, figures)


@cache
def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    return Environment(
        loader=DictLoader({name: _text(name) for name in ("report.html", "screen.html", "verdict.html")}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _text(name: str) -> str:
    return resources.files("kvbench.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _script_json(value: object) -> str:
    """JSON that cannot end its script element."""
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
