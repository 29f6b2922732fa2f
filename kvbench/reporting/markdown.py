"""The report as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.reporting import numbers, screened
from kvbench.reporting.latency_rows import tables
from kvbench.reporting.rows import MARKS, average_line, headline, matrix, pair_rows
from kvbench.reporting.view import Comparison, Relation


def markdown(comparison: Comparison) -> str:
    """Verdicts first, then the score matrix, then all comparisons in folded tables."""
    policy = comparison.policy
    parts = [f"## {_cell(comparison.title)}", _cell(headline(comparison))]
    if comparison.screen is not None:
        parts.append(screened.markdown(comparison.screen))
    for verdict in comparison.verdicts:
        parts.append(
            f"**{_cell(verdict.arm)}: {verdict.reading}.** {_cell(verdict.sentence)}\n\n" + "\n".join(f"- {_cell(point)}" for point in verdict.points)
        )
    names = [arm.name for arm in comparison.arms]
    rows = []
    average = average_line(comparison)
    for line in [*matrix(comparison), *([average] if average is not None else [])]:
        cells = []
        for cell in line.cells:
            extra = f" ({cell.kept.removesuffix(' kept')})" if cell.kept else ""
            cells.append(f"{cell.score}{extra}{' ' + cell.mark if cell.mark else ''}")
        rows.append([line.label, str(line.n), line.chance, *cells])
    parts.append("### Scores\n\n" + _table(["task", "n", "chance", *names], rows))
    legend = ", ".join(f"{mark} {word}" for word, mark in MARKS.items())
    parts.append(
        f"In brackets: share of {_cell(comparison.reference_arm)}'s score kept (\u00d7: ratio of perplexities). "
        f"Against {_cell(comparison.reference_arm)}: {legend}. "
        f"{_capital(numbers.margin(policy))}; {policy.level * 100:.4g} % intervals."
    )
    for relation, title in _RELATIONS:
        found = pair_rows(comparison, relation)
        if found:
            body = [
                [
                    r.task,
                    r.arm,
                    r.reference,
                    f"{r.difference} [{r.difference_interval}]",
                    f"{r.retention} [{r.retention_interval}]",
                    r.p,
                    r.p_holm,
                    r.disposition,
                ]
                for r in found
            ]
            table = _table(["task", "arm", "against", "difference", "kept", "p", "p (Holm)", "disposition"], body)
            parts.append(f"<details><summary>{_cell(title.format(reference=comparison.reference_arm))}</summary>\n\n{table}\n\n</details>")
    for latency in (extras.latency for extras in comparison.extras if extras.latency is not None):
        for plain in tables(latency):
            notes = "\n".join(f"- {_cell(note)}" for note in plain.notes)
            parts.append(f"<details><summary>{_cell(plain.title)}</summary>\n\n{_table(plain.header, plain.rows)}\n\n{notes}\n\n</details>")
    if comparison.notes:
        parts.append("### Notes\n\n" + "\n".join(f"- {_cell(note)}" for note in comparison.notes))
    if comparison.command:
        parts.append(f"Regenerate:\n\n```sh\n{comparison.command}\n```")
    return "\n\n".join(parts) + "\n"


_RELATIONS: tuple[tuple[Relation, str], ...] = (
    ("target", "Every mapper against {reference}"),
    ("source", "Every mapper against the source alone"),
    ("zero", "Every mapper against an empty cache"),
    ("mapper", "Mapper against mapper"),
    ("context", "Source and controls against {reference}"),
)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(_cell(cell) for cell in header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(_cell(cell).replace(" []", "") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
