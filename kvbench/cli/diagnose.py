"""`kvbench diagnose`: what a mapper does to keys, values, attention and answers, on held-out text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.runs.measured import Diagnostics

SHOWN = (
    "r2_keys",
    "r2_values",
    "attention_cosine_native",
    "attention_cosine_propagated",
    "kl_nats",
    "top1_agreement",
    "nll_difference",
    "greedy_agreement",
)


def diagnose(
    source: opt.Source,
    target: opt.Target,
    out: Annotated[Path, typer.Option(help="New directory, or a run of `kvbench evaluate`, whose report then shows the figures.")],
    mapper: Annotated[list[str] | None, typer.Option(help="Artifact directory, NAME=DIRECTORY, embedded:ridge; repeat for more.")] = None,
    control: Annotated[list[str] | None, typer.Option(help="Controls; default raw, random and zero. Give 'none' for none.")] = None,
    data: Annotated[str | None, typer.Option(help="Text, as for `kvbench calibrate`; what the mappers were fitted on is left out.")] = None,
    moments: Annotated[Path | None, typer.Option(help="Take the held-out sequences of these moments instead of --data.")] = None,
    prefix: Annotated[str, typer.Option(help="Context tokens, several separated by commas; all but the last of each are mapped.")] = "512",
    suffix: Annotated[int, typer.Option(help="Tokens behind the prefix that are scored.")] = 256,
    sequences: Annotated[int, typer.Option(help="Held-out sequences; intervals need 10.")] = 16,
    greedy_tokens: Annotated[int, typer.Option(help="Length of the greedy continuations; 0 for none.")] = 64,
    greedy_sequences: Annotated[int, typer.Option(help="How many sequences are continued.")] = 16,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.")] = 4,
    source_baseline: Annotated[bool, typer.Option("--source-baseline/--no-source-baseline", help="Also ask the source model itself.")] = True,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    device_map: opt.DeviceMap = None,
    attention: opt.Attention = "sdpa",
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    gates: opt.Gates = True,
    allow_mismatched: opt.Mismatched = False,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Measure reconstruction, attention-output cosines, error concentration, agreement and greedy continuations of mappers and controls, layer by layer."""
    opt.quiet_libraries()
    from kvbench.calibration.moments import Calibration
    from kvbench.cli.evaluate import check_early
    from kvbench.diagnostics.diagnose import DiagnoseSettings, check_settings, diagnose
    from kvbench.diagnostics.text import heldout_of, heldout_text
    from kvbench.errors import BadInputError
    from kvbench.mappers.artifact import caveats
    from kvbench.pairs.locate import load_tokenizer, resolve
    from kvbench.scoring.arms import artifact_path, equal_shapes, mapper_arm
    from kvbench.storage import dump_json, read_manifest

    prefixes = _lengths(prefix)
    if data is None and moments is None and all(name.startswith("embedded:") for name in (source, target)):
        data = "embedded:world"
    if data is None and moments is None:
        raise BadInputError("name the text with --data, or the moments whose held-out part is to be used with --moments")
    if data is not None and moments is not None:
        raise BadInputError("--data and --moments name two texts; give one of them")
    if sequences < 1:
        raise BadInputError(f"--sequences {sequences}; it must be at least 1")
    run = _check_out(out, source, target, overwrite)
    named = _named(mapper or [], control)
    check_early([spec for _, spec in named], None, source, target, None, None)
    opt.refuse_beyond_positions(
        "--prefix and --suffix together",
        max(prefixes) + suffix,
        (source, source_revision),
        (target, target_revision),
        trust_remote_code=trust_remote_code,
    )
    settings = DiagnoseSettings(prefixes, suffix, batch_size, greedy_tokens, greedy_sequences, seed)
    length = max(prefixes) + suffix
    if moments is not None:
        tokens, record = heldout_of(Calibration(moments), sequences=sequences, length=length)
    else:
        assert data is not None
        tokenizer = load_tokenizer(resolve(target, target_revision), trust_remote_code=trust_remote_code)
        fitted = [read_manifest(artifact_path(spec), "mapper") for _, spec in named if not _is_control(spec)]
        tokens, record = heldout_text(data, tokenizer, sequences=sequences, length=length, manifests=fitted)
    opt.say(f"text: {record['name']}, {len(tokens)} sequences of {length} tokens, {record['kept_apart']}")
    if len(tokens) < sequences:
        opt.say(f"warning: only {len(tokens)} of {sequences} sequences fit the held-out part; intervals need 10")
    models = opt.load_pair(
        source,
        target,
        source_revision=source_revision,
        target_revision=target_revision,
        dtype=dtype,
        device=device,
        device_map=device_map,
        attention=attention,
        trust_remote_code=trust_remote_code,
        gates=gates,
        allow_mismatched=allow_mismatched,
    )
    if control is None:
        named += [(name, name) for name in (("raw", "random", "zero") if equal_shapes(*models) else ("random", "zero"))]
    arms = {name: mapper_arm(spec, *models, name=name) for name, spec in named}
    for arm in arms.values():
        for name, told in caveats(arm.manifest or {}).items():
            opt.say(f"mapper '{arm.name}': {name}: {told}")
    check_settings(*models, {name: arm.mapper for name, arm in arms.items()}, tokens, settings)
    with opt.progress_bar() as bar:
        step = bar.add_task("diagnosing", total=0, unit="sequences", speed="")
        found = diagnose(
            *models,
            {name: arm.mapper for name, arm in arms.items()},
            tokens,
            settings,
            labels=dict(named),
            fitted=[name for name, arm in arms.items() if arm.manifest is not None],
            source_baseline=source_baseline,
            data=record,
            progress=lambda done, total: bar.update(step, completed=done, total=total),
        )
    found = with_single_source(found, {name: arm.manifest["fit"] for name, arm in arms.items() if arm.manifest is not None})
    write_diagnostics(found, out, beside_run=run, overwrite=overwrite)
    if json:
        print(dump_json(found.model_dump(mode="json")), end="")
    else:
        _print(found)
        print(out)
    if run:
        opt.say(f"shown by: kvbench report {out}")


def _lengths(text: str) -> tuple[int, ...]:
    from kvbench.errors import BadInputError

    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInputError(f"--prefix '{text}' is not a comma-separated list of token counts") from error
    if any(b <= a for a, b in itertools.pairwise(found)):
        raise BadInputError(f"--prefix {text}; give ascending lengths")
    return found


def _is_control(spec: str) -> bool:
    from kvbench.mappers.controls import CONTROLS

    return spec in CONTROLS


def _named(mappers: list[str], controls: list[str] | None) -> list[tuple[str, str]]:
    """(name, artifact or control), names once each."""
    from kvbench.errors import BadInputError

    found = []
    for item in dict.fromkeys([*mappers, *(c for c in controls or [] if c != "none")]):
        label, separator, location = item.partition("=")
        spec = location if separator else item
        found.append((label if separator else spec if _is_control(spec) or spec.startswith("embedded:") else Path(spec).name, spec))
    names = [name for name, _ in found]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise BadInputError(f"two arms would be called '{doubled[0]}'; name them with --mapper NAME=DIRECTORY")
    return found


def _check_out(out: Path, source: str, target: str, overwrite: bool) -> bool:
    """Whether `out` is a run; refuses one of another pair, and anything that would be overwritten."""
    from kvbench.errors import BadInputError
    from kvbench.runs import RunStore
    from kvbench.storage import check_writable

    if not (out / "spec.json").is_file():
        check_writable(out, overwrite=overwrite)
        return False
    spec = RunStore.open(out).spec
    for role, name, stored in (("source", source, spec.source), ("target", target, spec.target)):
        if stored is not None and stored.name != name:
            raise BadInputError(
                f"the run at '{out}' has the {role} '{stored.name}', not '{name}'; diagnose the pair of the run, or choose another --out"
            )
    if (out / "diagnostics.json").exists() and not overwrite:
        raise BadInputError(f"'{out / 'diagnostics.json'}' exists already; pass --overwrite to replace it")
    return True


def with_single_source(found: Diagnostics, fits: dict[str, dict[str, object]]) -> Diagnostics:
    """Add the single-source R2 matrices of fitted mappers, from their manifests, to the first entry of each arm."""
    entries, seen = [], set()
    for entry in found.mappers:
        fit = fits.get(entry.arm, {})
        if entry.arm not in seen and fit.get("single_source_r2_k"):
            matrices = {name: fit[f"single_source_r2_{kind}"] for name, kind in (("r2_keys", "k"), ("r2_values", "v"))}
            entry = type(entry).model_validate({**entry.model_dump(), **matrices})
            seen.add(entry.arm)
        entries.append(entry)
    return found.model_copy(update={"mappers": tuple(entries)})


def write_diagnostics(found: Diagnostics, out: Path, *, beside_run: bool, overwrite: bool) -> None:
    """Write diagnostics.json, figures.csv, layers.csv and the figures, whole or not at all.

    Args:
        found: what was measured.
        out: a new directory, or a run.
        beside_run: whether it is a run: the tables and figures then go to its folder `diagnostics`.
        overwrite: replace what is there.
    """
    from kvbench.reporting.diagnostics_figures import diagnostics_figures
    from kvbench.runs.files import write_stored
    from kvbench.storage import atomic_directory, dump_json

    arms = [arm for arm in found.arms() if arm != "source"]
    figures = diagnostics_figures(found, lambda arm: arms.index(arm) if arm in arms else None)
    with atomic_directory(out / "diagnostics" if beside_run else out, overwrite=overwrite or beside_run) as directory:
        if not beside_run:
            (directory / "diagnostics.json").write_text(dump_json(found.model_dump(mode="json")), encoding="utf-8")
        tables(found, directory)
        (directory / "figures").mkdir()
        for figure in figures:
            (directory / "figures" / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
            (directory / "figures" / f"{figure.name}.png").write_bytes(figure.png)
    if beside_run:
        write_stored(out / "diagnostics.json", found)


def tables(found: Diagnostics, directory: Path) -> None:
    """figures.csv (one row per arm, prefix and figure) and layers.csv (by layer, position and class)."""
    import pandas as pd

    keys = ("arm", "role", "prefix", "sequences", "positions")
    rows = [{**{k: getattr(e, k) for k in keys}, **f.model_dump()} for e in found.mappers for f in e.figures]
    pd.DataFrame(rows).to_csv(directory / "figures.csv", index=False)
    profiles = [
        {"arm": e.arm, "prefix": e.prefix, "along": along, "figure": p.name, "at": at, "value": value}
        for e in found.mappers
        for along, group in (("layer", e.layers), ("position", e.by_position), ("class", e.by_class))
        for p in group
        for at, value in zip(p.at, p.values, strict=True)
    ]
    pd.DataFrame(profiles).to_csv(directory / "layers.csv", index=False)


def _print(found: Diagnostics) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{found.source} -> {found.target}")
    for column in ("arm", "prefix", "n", *SHOWN):
        table.add_column(column.replace("_", " "), justify="left" if column == "arm" else "right")
    for entry in found.mappers:
        figures = {figure.name: figure for figure in entry.figures}
        cells = []
        for name in SHOWN:
            figure = figures.get(name)
            if figure is None or figure.value is None:
                cells.append("-")
            else:
                bounds = f" [{figure.lower:.3f}, {figure.upper:.3f}]" if figure.lower is not None and figure.lower != figure.upper else ""
                cells.append(f"{figure.value:.4f}{bounds}")
        table.add_row(entry.arm, str(entry.prefix), str(entry.sequences), *cells)
    Console(width=None if Console().is_terminal else 220).print(table)
