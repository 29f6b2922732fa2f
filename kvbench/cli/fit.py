"""`kvbench fit`: fit a mapper on stored moments."""

from __future__ import annotations

import json as json_module
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.calibration.moments import Calibration
    from kvbench.mappers.base import Recipe
    from kvbench.pairs.models import LoadedModel


def fit(
    moments: Annotated[Path, typer.Argument(help="Directory that `kvbench calibrate` wrote.")],
    out: Annotated[Path, typer.Option(help="Artifact directory to write.")],
    recipe: Annotated[str, typer.Option(help="Recipe name, module:Class, or a recipe YAML file.")] = "ridge",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the recipe, e.g. --set k=8 --set lambda=0.01.")] = None,
    weights_dtype: Annotated[str, typer.Option(help="Storage of the weights: float32, float16 or bfloat16.")] = "float32",
    device: opt.Device = "cpu",
    trust_remote_code: opt.Trust = False,
    json: opt.Json = False,
    overwrite: opt.Overwrite = False,
) -> None:
    """Fit a mapper on stored moments. No model is loaded for closed forms; another k or lambda costs seconds.

    Recipes that train keep their state in OUT.partial and go on from it when the same command is given again.
    """
    opt.quiet_libraries()
    from kvbench.calibration.moments import Calibration
    from kvbench.mappers.artifact import caveats, check_dtype, save_mapper
    from kvbench.mappers.recipes import load_recipe
    from kvbench.mappers.training import report_to_stderr
    from kvbench.storage import check_writable
    from kvbench.timing.stage_lines import fit_line

    check_writable(out, overwrite=overwrite)
    check_dtype(weights_dtype)
    chosen = load_recipe(recipe, settings or [])
    calibration = Calibration(moments)
    opt.say(fit_line(calibration, chosen))
    models = models_of(calibration, device=device, trust_remote_code=trust_remote_code) if chosen.needs_models else None
    partial = out.with_name(out.name + ".partial") if chosen.needs_models else None
    if partial is not None and partial.exists():
        opt.say(f"going on with the unfinished fit in '{partial}'")
    with warnings.catch_warnings():
        # The fit is described below, p/n and its warning included.
        warnings.filterwarnings("ignore", message=".*features per target coordinate but only")
        mapper = chosen.fit(calibration, models=models, progress=report_to_stderr, checkpoint=partial)
    manifest = save_mapper(mapper, out, recipe=recorded(chosen), calibration=calibration.manifest, dtype=weights_dtype, overwrite=overwrite)
    if partial is not None:
        shutil.rmtree(partial, ignore_errors=True)
    for line in describe_fit(manifest.model_dump()):
        opt.say(line)
    for name, told in caveats(manifest.model_dump()).items():
        opt.say(f"{name}: {told}")
    print(json_module.dumps(summary(manifest.model_dump()), indent=2, sort_keys=True) if json else out)


def recorded(recipe: Recipe) -> dict[str, Any]:
    """Its configuration, its method by a name that finds it again: `module:Class` for recipes that are not registered."""
    from kvbench.mappers.registry import known_recipes

    location = f"{type(recipe).__module__}:{type(recipe).__qualname__}"
    found = recipe.configuration()
    return found if known_recipes().get(recipe.method) == location else {**found, "method": location}


def models_of(calibration: Calibration, *, device: str, trust_remote_code: bool) -> tuple[LoadedModel, LoadedModel]:
    """The models that were calibrated, loaded by the names in the manifest; their weights are compared with its fingerprints.

    Raises:
        KVBenchError: not to be had any more, or others than those calibrated.
    """
    from kvbench.calibration.sequences import pair_of
    from kvbench.pairs.models import load_model

    loaded = []
    for role in ("source", "target"):
        stored = calibration.manifest[role]
        opt.say(f"loading {stored['name']}")
        settings = {"revision": stored.get("revision"), "dtype": stored["dtype"], "attention": stored["attention_backend"]}
        loaded.append(load_model(stored["name"], device=device, trust_remote_code=trust_remote_code, **settings))
    return pair_of(calibration, (loaded[0], loaded[1]))


def summary(manifest: dict[str, Any]) -> dict[str, Any]:
    """The figures of a fit, averaged over target layers."""
    fitted = manifest["fit"]
    # A layer whose coordinates do not vary has no R2 and counts for nothing.
    defined = {name: [v for v in values if v is not None] for name, values in fitted.items() if name.startswith("r2_")}
    means = {name: sum(values) / len(values) for name, values in defined.items() if values}
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
