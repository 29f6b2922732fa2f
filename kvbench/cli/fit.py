"""`kvbench fit`: fit a mapper on stored moments."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench.cli import options as opt


def fit(
    moments: Annotated[Path, typer.Argument(help="Directory that `kvbench calibrate` wrote.")],
    out: Annotated[Path, typer.Option(help="Artifact directory to write.")],
    recipe: Annotated[str, typer.Option(help="Recipe name, module:Class, or a recipe YAML file.")] = "ridge",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the recipe, e.g. --set k=8 --set lambda=0.01.")] = None,
    weights_dtype: Annotated[str, typer.Option(help="Storage of the weights: float32, float16 or bfloat16.")] = "float32",
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Fit a mapper on stored moments. No model is loaded for closed forms; another k or lambda costs seconds."""
    from kvbench.calibration.moments import Calibration
    from kvbench.errors import BadInputError
    from kvbench.mappers.artifact import save_mapper
    from kvbench.mappers.recipes import load_recipe

    if out.exists() and not overwrite:
        raise BadInputError(f"'{out}' exists already; choose another --out or pass --overwrite")
    chosen = load_recipe(recipe, settings or [])
    calibration = Calibration(moments)
    mapper = chosen.fit(calibration)
    manifest = save_mapper(mapper, out, recipe=chosen.configuration(), calibration=calibration.manifest, dtype=weights_dtype, overwrite=overwrite)
    if json:
        print(json_module.dumps(summary(manifest.model_dump()), indent=2, sort_keys=True))
        return
    for line in describe_fit(manifest.model_dump()):
        opt.say(line)
    print(out)


def summary(manifest: dict[str, Any]) -> dict[str, Any]:
    """The figures of a fit, averaged over target layers."""
    fitted = manifest["fit"]
    means = {name: sum(values) / len(values) for name, values in fitted.items() if name.startswith("r2_") and values}
    return {
        "recipe": manifest["recipe"],
        "source": manifest["source"]["name"],
        "target": manifest["target"]["name"],
        "parameters": fitted.get("parameters"),
        "rows": fitted.get("rows"),
        "features": fitted.get("features"),
        "seconds": fitted.get("seconds"),
        **means,
    }


def describe_fit(manifest: dict[str, Any]) -> list[str]:
    """The same for people; in-sample figures never without features per row."""
    s = summary(manifest)
    recipe = ", ".join(f"{k.rstrip('_')}={v}" for k, v in s["recipe"].items() if k != "method")
    lines = [f"{s['recipe']['method']} ({recipe}): {s['source']} -> {s['target']}"]
    if s["parameters"] is not None:
        lines.append(f"parameters {s['parameters']:,}; fitted in {s['seconds']} s")
    if s["rows"] and s["features"]:
        lines.append(f"features per row (p/n): {s['features']:,}/{s['rows']:,} = {s['features'] / s['rows']:.3f}")
        if s["features"] > s["rows"]:
            lines.append("warning: more features than rows; the in-sample figures mean nothing, trust the held-out ones")
    for part in ("heldout", "insample"):
        if f"r2_k_{part}" in s:
            lines.append(
                f"R2 {'held-out ' if part == 'heldout' else 'in-sample'}: K {s[f'r2_k_{part}']:.4f}, V {s[f'r2_v_{part}']:.4f} (mean over target layers)"
            )
    return lines
