"""`kvbench mapper ls | show | verify`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

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
    from kvbench.storage import read_manifest

    if directory is not None and not directory.is_dir():
        raise BadInputError(f"'{directory}' is not a directory")
    artifacts = []
    for root in (mappers_directory() / "artifacts", directory):
        for path in sorted(p for p in root.iterdir() if p.is_dir()) if root is not None and root.is_dir() else []:
            try:
                manifest = read_manifest(path, "mapper")
            except ArtifactError:
                continue
            artifacts.append(
                {
                    "path": str(path),
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
        print(f"  {artifact['path']}  {artifact['method']}: {artifact['source']} -> {artifact['target']}")


@app.command("show")
def show(artifact: Artifact, json: opt.Json = False) -> None:
    """Show what a fitted mapper is: recipe, pair, calibration, R2, pins."""
    from kvbench.cli.fit import describe_fit
    from kvbench.scoring.arms import artifact_path
    from kvbench.storage import read_manifest

    manifest = read_manifest(artifact_path(artifact), "mapper")
    if json:
        print(json_module.dumps(manifest, indent=2, sort_keys=True))
        return
    for line in describe_fit(manifest):
        print(line)
    calibration = manifest["calibration"]
    print(
        f"calibrated on {calibration['name']}: {calibration['sequences']} sequences of {calibration['seq_len']} tokens, stride {calibration['stride']}, "
        f"{calibration['rows']:,} rows, seed {calibration['seed']}, tokens {calibration['fingerprint'][:16]}"
    )
    for role in ("source", "target"):
        pin = manifest[role]
        print(
            f"{role} {pin['name']} revision {pin['revision'] or 'local'} config {pin['config_fingerprint'][:12]} weights {pin['weights_fingerprint'][:12]}"
        )
    print(f"written {manifest['created']} by kvbench {manifest['versions']['kvbench']}")


@app.command("verify")
def verify(artifact: Artifact, json: opt.Json = False) -> None:
    """Check every byte of a fitted mapper against its checksums and its manifest."""
    from kvbench.mappers.artifact import load_mapper
    from kvbench.scoring.arms import artifact_path

    path = artifact_path(artifact)
    _, manifest = load_mapper(path)
    if json:
        print(json_module.dumps({"path": str(path), "intact": True, "format_version": manifest["format_version"]}, sort_keys=True))
    else:
        print(f"{path}: intact (format version {manifest['format_version']})")
