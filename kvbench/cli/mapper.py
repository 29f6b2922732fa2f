"""`kvbench mapper ls | show | verify | import | export`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import options as opt

app = typer.Typer(help="Recipes and fitted mappers.", no_args_is_help=True)
Artifact = Annotated[str, typer.Argument(help="Artifact directory or embedded:ridge.")]


@app.command("ls")
def ls(directory: Annotated[Path | None, typer.Argument(help="Also list the artifacts in this directory.")] = None, json: opt.Json = False) -> None:
    """List known recipes, the embedded artifacts, and those in a directory."""
    from kvbench.errors import ArtifactError, BadInputError
    from kvbench.mappers.registry import known_recipes
    from kvbench.paths import mappers_directory
    from kvbench.storage import read_manifest, verify_sums

    if directory is not None and not directory.is_dir():
        raise BadInputError(f"'{directory}' is not a directory")
    artifacts: list[dict[str, Any]] = []
    for root in (mappers_directory() / "artifacts", directory):
        for path in sorted(p for p in root.iterdir() if p.is_dir()) if root is not None and root.is_dir() else []:
            try:
                manifest = read_manifest(path, "mapper")
            except ArtifactError:
                continue
            try:
                verify_sums(path)
                damage = None
            except ArtifactError as error:
                damage = str(error)
            artifacts.append(
                {
                    "path": str(path),
                    "damage": damage,
                    "method": manifest["recipe"]["method"],
                    "source": manifest["source"]["name"],
                    "target": manifest["target"]["name"],
                }
            )
    recipes = known_recipes()
    if json:
        print(json_module.dumps({"recipes": recipes, "artifacts": artifacts}, indent=2, sort_keys=True))
        return
    print("recipes:")
    for name, location in sorted(recipes.items()):
        print(f"  {name:<14} {location}")
    print("artifacts:")
    for artifact in artifacts:
        shown = Path(artifact["path"])
        name = shown.name.replace("-", ":", 1) if shown.parent == mappers_directory() / "artifacts" else str(shown)
        print(
            f"  {name}  {artifact['method']}: {artifact['source']} -> {artifact['target']}{'  DAMAGED: ' + artifact['damage'] if artifact['damage'] else ''}"
        )


@app.command("show")
def show(artifact: Artifact, json: opt.Json = False) -> None:
    """Show what a fitted mapper is: recipe, pair, calibration, R2, pins, and what is unknown or experimental."""
    from kvbench.cli.fit import describe_fit
    from kvbench.mappers.artifact import caveats
    from kvbench.scoring.arms import artifact_path
    from kvbench.storage import read_manifest

    manifest = read_manifest(artifact_path(artifact), "mapper")
    if json:
        print(json_module.dumps(manifest, indent=2, sort_keys=True))
        return
    for line in _origin(manifest) if manifest.get("imported") else describe_fit(manifest):
        print(line)
    print(_calibration(manifest["calibration"]))
    for role in ("source", "target"):
        pin = manifest[role]
        marks = {name: (pin[f"{name}_fingerprint"] or "unknown")[:12] for name in ("config", "weights", "tokenizer")}
        revision = pin["revision"] or ("unknown" if "revision" in pin.get("unknown", ()) else "local")
        print(f"{role} {pin['name']} revision {revision} {' '.join(f'{name} {mark}' for name, mark in marks.items())}")
    for name, told in caveats(manifest).items():
        print(f"{name}: {told}")
    print(f"written {manifest['created']} by kvbench {manifest['versions']['kvbench']}")


def _origin(manifest: dict[str, Any]) -> list[str]:
    """What an imported map is; figures only where its format has them."""
    imported, fit = manifest["imported"], manifest["fit"]
    recipe = ", ".join(f"{k.rstrip('_')}={v}" for k, v in manifest["recipe"].items() if k != "method" and v is not None)
    lines = [f"imported ({recipe}): {manifest['source']['name']} -> {manifest['target']['name']}", f"parameters {fit['parameters']:,}"]
    for part, label in (("heldout", "held-out"), ("insample", "in-sample")):
        found = {kind: fit.get(f"r2_{kind}_{part}") for kind in "kv"}
        if all(found.values()):
            means = ", ".join(f"{kind.upper()} {sum(values) / len(values):.4f}" for kind, values in found.items())
            lines.append(f"R2 {label}: {means} (mean over target layers, as stated by {imported['format']})")
    return [*lines, *(f"note: {note}" for note in imported["notes"])]


def _calibration(data: dict[str, Any]) -> str:
    """One line; what is not known says so."""
    known = {name: "unknown" if data.get(name) is None else data[name] for name in ("name", "sequences", "seq_len", "stride", "rows", "fingerprint")}
    rows = f"{known['rows']:,}" if isinstance(known["rows"], int) else known["rows"]
    return (
        f"calibrated on {known['name']}: {known['sequences']} sequences of {known['seq_len']} tokens, stride {known['stride']}, "
        f"{rows} rows, seed {data.get('seed')}, tokens {str(known['fingerprint'])[:16]}"
    )


@app.command("verify")
def verify(
    artifact: Annotated[str, typer.Argument(help="Artifact directory, embedded:ridge, or the directory of a screen.")],
    against: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="SOURCE TARGET", help="Compare with these models instead, from their files, without loading weights."),
    ] = None,
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    json: opt.Json = False,
) -> None:
    """Check every byte of a fitted mapper against its checksums and its manifest; with --against, whether it belongs to two models.

    Exit status 0: intact, and belongs to them; 4: it does not; 2: damaged or not there.
    """
    if against is not None:
        _verify_against(artifact, against, source_revision, target_revision, json)
        return
    from kvbench.errors import ArtifactError
    from kvbench.mappers.artifact import load_mapper
    from kvbench.scoring.arms import artifact_path
    from kvbench.screening.verify import MAPPER, SPEC, VERDICT

    path = artifact_path(artifact)
    if (path / VERDICT).is_file() and (path / MAPPER).is_dir():
        path = path / MAPPER
    elif (path / SPEC).is_file():
        raise ArtifactError(f"the screen at '{path}' has no chosen mapper; repeat its command if it was stopped, or see its report")
    _, manifest = load_mapper(path)
    if json:
        print(json_module.dumps({"path": str(path), "intact": True, "format_version": manifest["format_version"]}, sort_keys=True))
    else:
        print(f"{path}: intact (format version {manifest['format_version']})")


def _verify_against(artifact: str, against: tuple[str, str], source_revision: str | None, target_revision: str | None, json: bool) -> None:
    """Nothing here may import torch: a router waits for it at start-up."""
    from kvbench.paths import mappers_directory
    from kvbench.screening.verify import VERDICT_FINDING, verify_against

    path = mappers_directory() / "artifacts" / artifact.replace(":", "-") if artifact.startswith("embedded:") else Path(artifact)
    found = verify_against(path, *against, source_revision=source_revision, target_revision=target_revision)
    if json:
        print(json_module.dumps(found.to_dict(), indent=2, sort_keys=True))
    else:
        for finding in found.findings:
            print(f"{finding.status:<11} {finding.what}{': ' + finding.detail if finding.detail else ''}")
        belongs = all(f.status != "differs" or f.what == VERDICT_FINDING for f in found.findings)
        words = "belongs to" if belongs else "does NOT belong to"
        refused = ", but the verdict of its screen is not deploy" if belongs and not found.passed else ""
        print(f"{found.path}: {words} {against[0]} -> {against[1]}{refused}; mapper id {found.mapper_id[:16]}")
    if not found.passed:
        raise typer.Exit(4)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="Directory in the foreign format.")],
    out: Annotated[Path, typer.Option(help="Artifact directory to write.")],
    kind: Annotated[str, typer.Option("--from", help="Its format: veloxquant, router or kvxfer.")],
    source: Annotated[str | None, typer.Option(help=f"The source at hand, to pin by configuration and tokenizer: {opt.MODEL}.")] = None,
    target: Annotated[str | None, typer.Option(help="The target at hand, likewise.")] = None,
    variant: Annotated[str | None, typer.Option(help="Which of several maps (kvxfer: ridge, whitened, ...).")] = None,
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Take in a linear map that another tool fitted. What its format does not pin, name with --source and --target, or it is recorded as unknown."""
    opt.quiet_libraries()
    from kvbench.errors import BadInputError
    from kvbench.mappers.artifact import caveats
    from kvbench.mappers.foreign import import_mapper

    for role, name, revision in (("source", source, source_revision), ("target", target, target_revision)):
        if revision is not None and name is None:
            raise BadInputError(f"--{role}-revision {revision} is given without --{role}; name the model too")
    models = {role: (name, revision) for role, name, revision in (("source", source, source_revision), ("target", target, target_revision)) if name}
    manifest = import_mapper(path, out, kind, models=models, variant=variant, trust_remote_code=trust_remote_code, overwrite=overwrite).model_dump()
    if json:
        print(json_module.dumps(manifest, indent=2, sort_keys=True))
        return
    for line in _origin(manifest):
        opt.say(line)
    for name, told in caveats(manifest).items():
        opt.say(f"{name}: {told}")
    print(out)


@app.command("export")
def export(
    artifact: Artifact,
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    kind: Annotated[str, typer.Option("--to", help="Format: router or veloxquant.")],
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; default as stored, so that nothing changes.")] = None,
    source_revision: Annotated[str | None, typer.Option(help="Commit of the source to state (router).")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Commit of the target to state (router).")] = None,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Write a full-head linear map in another tool's format."""
    from kvbench.mappers.foreign import export_mapper
    from kvbench.scoring.arms import artifact_path

    revisions = {"source": source_revision, "target": target_revision}
    foreign = export_mapper(artifact_path(artifact), out, kind, dtype=dtype, revisions=revisions, overwrite=overwrite)
    if kind == "router":
        for role in ("source", "target"):
            if foreign["compatibility"][f"{role}_revision"] == "unknown":
                opt.say(
                    f"warning: no revision of the {role} is pinned, so 'unknown' is written, which no deployment matches; give --{role}-revision COMMIT"
                )
    if json:
        print(json_module.dumps(foreign, indent=2, sort_keys=True))
    else:
        print(out)
