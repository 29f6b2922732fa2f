"""Figures of `kvbench diagnose`: by layer, by position, by class of token, over prefix length, and what the target says in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.reporting.curves import Curve, curves, heatmaps
from kvbench.reporting.plots import INK, MARKERS, NEUTRAL, PALETTE, Figure, draw
from kvbench.runs.measured import Diagnostics, LayerDiagnostics, Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

ColourOf = Callable[[str], int | None]
_SHORT = {"first tokens": "first", "attention sinks": "sinks", "rare tokens": "rare", "other": "other"}


def diagnostics_figures(found: Diagnostics, colour_of: ColourOf) -> list[Figure]:
    """All figures that the data allow.

    Args:
        found: from diagnostics.json.
        colour_of: palette index of an arm, None for grey.
    """
    figures = _heatmaps(found)
    shortest = [entry for arm in found.arms() if (entry := found.entry(arm)) is not None]
    lines = _cosines(shortest, colour_of)
    if lines:
        caption = f"Cosine between attention outputs on the mapped and on the target's own prefix; 1 is identical. {_basis(shortest)}"
        figures.append(curves("cosine", "Attention-output cosine", caption, lines, x_label=_axis("target layer", shortest), y_label="cosine"))
    shown = [entry for entry in shortest if _profile(entry.layers, "r2_keys") is not None]
    # The controls' R2 goes far below zero and would flatten the rest.
    shown = [entry for entry in shown if entry.role == "mapper"] or shown
    lines = [line for entry in shown for line in _by_layer(entry, colour_of)]
    if lines:
        caption = f"R\u00b2 of mapped keys (without RoPE, solid) and values (dashed) by target layer, mean over heads. {_basis(shown)}"
        figures.append(curves("r2_layers", "Reconstruction by layer", caption, lines, x_label=_axis("target layer", shown), y_label="R\u00b2"))
    lines = [line for entry in shown for line in _by_position(entry, colour_of)]
    if lines:
        caption = f"Relative error of mapped keys (solid) and values (dashed) by position in the prefix, bins that double in width. {_basis(shown)}"
        figures.append(
            curves(
                "error_position",
                "Error by position",
                caption,
                lines,
                x_label=_axis("position in the prefix, start of the bin", shown),
                y_label="relative error",
                log_x=True,
            )
        )
    classes = _classes(shown, colour_of)
    if classes is not None:
        figures.append(classes)
    said = _said(shortest, colour_of)
    if said is not None:
        figures.append(said)
    return figures + _over_length(found, colour_of)


def _heatmaps(found: Diagnostics) -> list[Figure]:
    figures = []
    for number, arm in enumerate(found.arms()):
        entry = found.entry(arm)
        panels = [(f"{arm}, {label}", m) for label, m in (("keys", entry.r2_keys), ("values", entry.r2_values)) if m] if entry else []
        if panels:
            caption = "Held-out R\u00b2 of mapping one source layer to one target layer. Bright is predictable."
            figures.append(heatmaps(f"r2_{number}", f"R\u00b2 by layer, {arm}", caption, panels))
    return figures


def _basis(entries: Sequence[LayerDiagnostics]) -> str:
    """How much text a figure rests on."""
    known = next((e for e in entries if e.sequences is not None), None)
    if known is None:
        return ""
    return f"n = {known.sequences} held-out sequences, prefix {known.prefix:,}, {known.positions:,} positions behind it."


def _axis(label: str, entries: Sequence[LayerDiagnostics]) -> str:
    """An axis that says how much text is behind the figure, for files that are shown without their caption."""
    known = next((e for e in entries if e.sequences is not None), None)
    if known is None:
        return label
    lengths = {e.prefix for e in entries}
    # Of several lengths a figure shows one, and says which.
    prefix = f"prefix {known.prefix:,}, " if len(lengths) == 1 and known.prefix is not None and "prefix" not in label else ""
    return f"{label} ({prefix}n = {known.sequences} sequences)"


def _profile(profiles: Sequence[Profile], name: str) -> Profile | None:
    return next((p for p in profiles if p.name == name), None)


def _cosines(entries: Sequence[LayerDiagnostics], colour_of: ColourOf) -> list[Curve]:
    lines = []
    for entry in entries:
        for variant, cosines in (("native", entry.cosine_native), ("propagated", entry.cosine_propagated)):
            if cosines:
                layers = [float(i) for i, value in enumerate(cosines) if value is not None]
                values = [value for value in cosines if value is not None]
                lines.append(Curve(f"{entry.arm} ({variant})", layers, values, colour=colour_of(entry.arm), dashed=variant == "propagated"))
    return lines


def _by_layer(entry: LayerDiagnostics, colour_of: ColourOf) -> list[Curve]:
    lines = []
    for name, short, dashed in (("r2_keys", "K", False), ("r2_values", "V", True)):
        profile = _profile(entry.layers, name)
        if profile is not None:
            points = [(float(i), v) for i, v in enumerate(profile.values) if v is not None]
            lines.append(Curve(f"{entry.arm} {short}", [x for x, _ in points], [y for _, y in points], colour=colour_of(entry.arm), dashed=dashed))
    return lines


def _by_position(entry: LayerDiagnostics, colour_of: ColourOf) -> list[Curve]:
    lines = []
    for name, short, dashed in (("relative_error_keys", "K", False), ("relative_error_values", "V", True)):
        profile = _profile(entry.by_position, name)
        if profile is not None:
            # Position 0 has no place on a logarithmic axis; it stands at a half.
            starts = [max(0.5, float(label.split("-")[0])) for label in profile.at]
            values = [v if v is not None else float("nan") for v in profile.values]
            lines.append(Curve(f"{entry.arm} {short}", starts, values, colour=colour_of(entry.arm), dashed=dashed))
    return lines


def _classes(entries: Sequence[LayerDiagnostics], colour_of: ColourOf) -> Figure | None:
    rows = [
        {"arm": entry.arm, "what": profile.name.removeprefix("relative_error_"), "class": label, "relative_error": value, "tokens": count}
        for entry in entries
        for profile in entry.by_class
        for label, value, count in zip(profile.at, profile.values, profile.n, strict=True)
        if value is not None
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    arms, classes = list(dict.fromkeys(data["arm"])), list(dict.fromkeys(data["class"]))
    counts = data.drop_duplicates("class").set_index("class")["tokens"]

    def paint(figure: MatplotlibFigure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        width = 0.8 / len(arms)
        for axes, what in zip(panels, ("keys", "values"), strict=True):
            for number, arm in enumerate(arms):
                part = data[(data["arm"] == arm) & (data["what"] == what)].set_index("class")["relative_error"].reindex(classes)
                index = colour_of(arm)
                colour = NEUTRAL if index is None else PALETTE[index % len(PALETTE)]
                axes.bar([i + (number + 0.5) * width - 0.4 for i in range(len(classes))], part, width * 0.92, color=colour, label=arm)
            axes.set_title(f"{what} (tokens below)", fontsize=9)
            axes.set_xticks(range(len(classes)), [f"{_SHORT.get(c, c)}\n{counts[c]:,}" for c in classes])
            axes.grid(True, axis="y")
            axes.set_axisbelow(True)
        panels[0].set_ylabel("relative error")
        panels[0].legend(fontsize=8)

    caption = f"Relative error by class of token; under each class how many tokens it has. {_basis(entries)}"
    return draw("error_class", "Error by class of token", caption, data, 2.9, paint, footnote=_basis(entries))


def _said(entries: Sequence[LayerDiagnostics], colour_of: ColourOf) -> Figure | None:
    """KL and top-1 agreement of every arm, the source model among them."""
    names = ("kl_nats", "top1_agreement", "greedy_agreement")
    rows = [
        {"arm": e.arm, "figure": f.name, "value": f.value, "lower": f.lower, "upper": f.upper, "n": f.n}
        for e in entries
        for f in e.figures
        if f.name in names and f.value is not None
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows)
    arms = list(dict.fromkeys(data["arm"]))[::-1]

    def paint(figure: MatplotlibFigure) -> None:
        present = [name for name in names if (data["figure"] == name).any()]
        panels = figure.subplots(1, len(present), sharey=True, squeeze=False)[0]
        n = entries[0].sequences
        labels = {
            "kl_nats": "KL, nats/token" + (f" (n = {n})" if n else ""),
            "top1_agreement": "same top token",
            "greedy_agreement": "same greedy tokens",
        }
        for axes, name in zip(panels, present, strict=True):
            part = data[data["figure"] == name].set_index("arm")
            for row, arm in enumerate(arms):
                if arm not in part.index:
                    continue
                index = colour_of(arm)
                colour = NEUTRAL if index is None else PALETTE[index % len(PALETTE)]
                found = part.loc[arm]
                if pd.notna(found["lower"]):
                    axes.plot([found["lower"], found["upper"]], [row, row], color=colour, linewidth=2)
                axes.plot([found["value"]], [row], MARKERS[0], color=colour, markersize=5)
            axes.set_xlabel(labels[name])
            axes.grid(True, axis="x")
            axes.set_axisbelow(True)
            if name != "kl_nats":
                axes.set_xlim(-0.03, 1.03)
            else:
                axes.axvline(0, color=INK, linewidth=1)
        panels[0].set_yticks(range(len(arms)), arms)
        panels[0].set_ylim(-0.6, len(arms) - 0.4)

    caption = (
        f"What the target says next on the mapped prefix against its own: 0 nats, 1 and 1 are identical; 'source' is what the small model itself would "
        f"have said. Bars are 95 % intervals. {_basis(entries)}"
    )
    return draw("agreement", "Agreement with the target on its own prefix", caption, data, 0.9 + 0.28 * len(arms), paint, footnote=_basis(entries))


def _over_length(found: Diagnostics, colour_of: ColourOf) -> list[Figure]:
    lengths = found.prefixes()
    if len(lengths) < 2:
        return []
    figures = []
    wanted = (
        ("top1_agreement", "Same top token over prefix length", "same top token, share of positions"),
        ("attention_cosine_native", "Attention-output cosine over prefix length", "cosine, native"),
        ("kl_nats", "KL over prefix length", "KL, nats per token"),
    )
    first = found.mappers[0]
    for name, title, label in wanted:
        lines = []
        for arm in found.arms():
            points = [(float(n), f) for n in lengths if (f := found.figure(arm, name, n)) is not None and f.value is not None]
            if points:
                values = [f.value if f.value is not None else 0.0 for _, f in points]
                lower, upper = [f.lower for _, f in points], [f.upper for _, f in points]
                lines.append(Curve(arm, [x for x, _ in points], values, lower, upper, colour=colour_of(arm)))
        if lines:
            caption = f"{label[0].upper()}{label[1:]}; bands are 95 % intervals. n = {first.sequences} sequences, {first.positions} positions behind each prefix."
            # Controls lie far above mappers in KL; a logarithm shows both, where no arm is at 0.
            heights = [v for line in lines for v in (*line.y, *(line.lower or ()), *(line.upper or ())) if v is not None]
            log_y = name == "kl_nats" and min(heights) > 0
            axis = _axis("prefix tokens", found.mappers)
            figures.append(curves(f"length_{name}", title, caption, lines, x_label=axis, y_label=label, log_x=True, log_y=log_y))
    return figures
