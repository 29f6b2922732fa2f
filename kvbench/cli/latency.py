"""`kvbench latency`: what a transfer costs against the target's own prefill."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel
    from kvbench.runs.latency import Latency
    from kvbench.scoring.arms import Arm
    from kvbench.timing.baselines import ServerBaseline
    from kvbench.timing.latency import LatencySettings


def latency(
    source: opt.Source,
    target: opt.Target,
    mapper: Annotated[list[str], typer.Option(help="Artifact directory, NAME=DIRECTORY, embedded:ridge, or a control; repeat for more.")],
    out: Annotated[Path, typer.Option(help="Directory to write latency.json, tables and figures to: a run of `kvbench evaluate`, or a new one.")],
    lengths: Annotated[str | None, typer.Option(help="Context tokens, increasing; default 64,128,...,32768 as far as the positions reach.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Rows, increasing.")] = "1",
    warmups: Annotated[int, typer.Option(help="Runs of each piece that are thrown away.")] = 5,
    repeats: Annotated[int, typer.Option(help="Runs of each piece that count.")] = 30,
    hold_back: Annotated[int, typer.Option(help="Last context tokens that the target runs itself after a transfer.")] = 1,
    head: Annotated[bool, typer.Option("--head/--no-head", help="Also time the target's forward with logits at every position.")] = True,
    baseline: Annotated[list[str] | None, typer.Option(help="transformers (always there) or vllm; repeat for more.")] = None,
    baseline_url: Annotated[str | None, typer.Option(help="A running OpenAI-compatible server of the target, e.g. http://localhost:8000.")] = None,
    baseline_model: Annotated[str | None, typer.Option(help="The target's name on that server.")] = None,
    baseline_prompt: Annotated[str, typer.Option(help="How that server is asked: tokens or text.")] = "tokens",
    quality: Annotated[
        str | None, typer.Option(help="Held-out text (as --data of calibrate): agreement against latency, with the Pareto front.")
    ] = None,
    quality_hold_backs: Annotated[str, typer.Option(help="Values of hold_back to compare.")] = "1,16,64,256",
    quality_tokens: Annotated[int | None, typer.Option(help="Context tokens; default the longest of --lengths that leaves room.")] = None,
    quality_sequences: Annotated[int, typer.Option(help="Held-out sequences.")] = 16,
    quality_run: Annotated[list[Path] | None, typer.Option(help="Runs of `kvbench evaluate` whose mean accuracy is shown too; arms by name.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also measure the peak memory of calibrate, fit, apply and evaluate.")] = False,
    seed: Annotated[int, typer.Option(help="Token ids and the order of the lengths.")] = 0,
    threads: Annotated[int | None, typer.Option(help="torch threads; default torch's own.")] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    device_map: opt.DeviceMap = None,
    attention: opt.Attention = "sdpa",
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    gates: opt.Gates = True,
    allow_mismatched: opt.Mismatched = False,
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
) -> None:
    """Time to the first token after a transfer, warm and cold, against the target's own prefill, phase by phase, with floors."""
    opt.quiet_libraries()
    from kvbench.cli.latency_output import print_latency, write_latency
    from kvbench.errors import BadInputError
    from kvbench.runs.files import write_stored
    from kvbench.runs.provenance import collect
    from kvbench.storage import check_writable, utc_now
    from kvbench.timing.latency import measure
    from kvbench.timing.stage_lines import latency_line

    begun = utc_now()
    check_writable(out, overwrite=True)
    if (out / "latency.json").exists() and not overwrite:
        raise BadInputError(f"'{out}' holds a latency measurement already; choose another --out or pass --overwrite")
    settings = _settings(lengths, batch_sizes, warmups, repeats, hold_back, seed, head, (source, target), trust_remote_code)
    wanted = [label for label in dict.fromkeys(baseline or []) if label != "transformers"]
    server = _baselines(wanted, baseline_url, baseline_model, baseline_prompt)
    specs = _specs(mapper, source, target)
    backs = integers("quality-hold-backs", quality_hold_backs) if quality or quality_run else ()
    if quality_run and not quality:
        raise BadInputError("--quality-run adds accuracies to a comparison of quality and cost; give its held-out text with --quality")
    if server is not None and baseline_prompt == "tokens":
        server.probe()
    _set_threads(threads)
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
    arms = _arms(specs, *models)
    mappers = {name: arm.mapper for name, arm in arms.items()}
    settings.check(*models)
    if server is not None and baseline_prompt == "text":
        server.decode_with(models[1].tokenizer)
        server.probe()
    opt.say(latency_line(models, settings.lengths[-1] * settings.batch_sizes[-1]))
    found = measure(*models, mappers, settings, progress=_tell)
    found = _with_baselines(found, wanted, server, models[1], settings)
    if quality:
        found = _with_quality(found, arms, models, settings, quality, backs, quality_tokens, quality_sequences, quality_run or [])
    if memory:
        opt.say("measuring peak memory by stage")
        found = _with_memory(found, arms, models, settings)
    write_stored(out / "latency.json", found)
    write_latency(out / "latency", found)
    notes = [*found.notes, *(f"{e.tokens} tokens x {e.batch} ended at {e.phase}: {e.reason}" for e in found.ended)]
    write_stored(out / "latency" / "provenance.json", collect(started_utc=begun, notes=notes))
    print_latency(found, as_json=json)
    if not json:
        opt.say(f"tables and figures: {out / 'latency'}")
        print(out / "latency.json")


def _tell(done: int, total: int, what: str) -> None:
    """What is being timed. No live display: its refreshing thread would be timed too."""
    opt.say(f"[{done}/{total}] {what}")


def integers(option: str, text: str) -> tuple[int, ...]:
    """Increasing positive integers, separated by commas.

    Raises:
        BadInputError: anything else.
    """
    from itertools import pairwise

    from kvbench.errors import BadInputError

    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BadInputError(f"--{option} '{text}': give whole numbers separated by commas, e.g. 64,256,1024") from error
    if values[0] < 1 or any(b <= a for a, b in pairwise(values)):
        raise BadInputError(f"--{option} '{text}': the numbers must be positive and increasing, e.g. 64,256,1024")
    return values


def _settings(
    lengths: str | None,
    batch_sizes: str,
    warmups: int,
    repeats: int,
    hold_back: int,
    seed: int,
    head: bool,
    names: tuple[str, str],
    trust_remote_code: bool,
) -> LatencySettings:
    """What is measured, checked against both configurations before any weight is read."""
    from kvbench.errors import BadInputError
    from kvbench.pairs.geometry import geometry_of
    from kvbench.pairs.locate import load_config, resolve
    from kvbench.timing.latency import PAPER_LENGTHS, LatencySettings

    reaches = {}
    for name in names:
        reaches[name] = geometry_of(load_config(resolve(name), trust_remote_code=trust_remote_code)).max_positions or max(PAPER_LENGTHS)
    tightest = min(reaches, key=lambda name: reaches[name])
    if lengths is None:
        chosen = tuple(n for n in PAPER_LENGTHS if hold_back < n <= reaches[tightest])
        if left := [n for n in PAPER_LENGTHS if n > reaches[tightest]]:
            opt.say(f"lengths {left[0]:,} and up are left out: '{tightest}' has {reaches[tightest]:,} positions")
    else:
        chosen = integers("lengths", lengths)
        if chosen[-1] > reaches[tightest]:
            raise BadInputError(f"--lengths: {chosen[-1]:,} is beyond the {reaches[tightest]:,} positions of '{tightest}'; use lengths up to that")
    settings = LatencySettings(
        lengths=chosen,
        batch_sizes=integers("batch-sizes", batch_sizes),
        warmups=warmups,
        repeats=repeats,
        hold_back=hold_back,
        seed=seed,
        with_head=head,
    )
    settings.check_numbers()
    return settings


def _baselines(wanted: list[str], url: str | None, model: str | None, prompt: str) -> ServerBaseline | None:
    """Check the baselines before any weight is read; the server's, if one was named."""
    from kvbench.errors import BadInputError
    from kvbench.timing.baselines import BASELINES, ServerBaseline, import_vllm

    if unknown := [label for label in wanted if label not in BASELINES]:
        raise BadInputError(f"unknown baseline '{unknown[0]}'; use {' or '.join(BASELINES)}, or --baseline-url for a running server")
    if "vllm" in wanted:
        import_vllm()
    if (url is None) != (model is None):
        raise BadInputError("--baseline-url and --baseline-model belong together: where the server is, and what the target is called there")
    if prompt not in ("tokens", "text"):
        raise BadInputError(f"--baseline-prompt '{prompt}'; use tokens or text")
    return ServerBaseline(url, model, prompt_as="text" if prompt == "text" else "tokens") if url is not None and model is not None else None


def _specs(mappers: list[str], source: str, target: str) -> dict[str, str]:
    """Mapper by name, as given; checked against both configurations before any weight is read.

    Raises:
        BadInputError: two of one name, or one that is no mapper.
        ArtifactError: of another pair.
    """
    from kvbench.errors import BadInputError
    from kvbench.mappers.controls import CONTROLS
    from kvbench.pairs.locate import load_config, resolve
    from kvbench.pairs.pins import check_pin
    from kvbench.pairs.tokenizers import config_fingerprint
    from kvbench.scoring.arms import artifact_path
    from kvbench.storage import read_manifest

    found: dict[str, str] = {}
    for item in mappers:
        label, separator, location = item.partition("=")
        where = location if separator else item
        name = label if separator else (item if item in CONTROLS else artifact_path(item).name)
        if name in found:
            raise BadInputError(f"two mappers would be called '{name}'; name them with --mapper NAME=DIRECTORY")
        if where not in CONTROLS:
            manifest = read_manifest(artifact_path(where), "mapper")
            for role, model in (("source", source), ("target", target)):
                pinned = {"name": model, "config_fingerprint": config_fingerprint(load_config(resolve(model)))}
                check_pin(manifest[role], pinned, role, f"mapper '{where}'")
        found[name] = where
    return found


def _arms(specs: dict[str, str], source: LoadedModel, target: LoadedModel) -> dict[str, Arm]:
    from kvbench.mappers.artifact import caveats
    from kvbench.scoring.arms import mapper_arm

    arms = {}
    for name, where in specs.items():
        arms[name] = mapper_arm(where, source, target, name=name)
        for caveat, told in caveats(arms[name].manifest or {}).items():
            opt.say(f"mapper '{name}': {caveat}: {told}")
    return arms


def _set_threads(threads: int | None) -> None:
    from kvbench.errors import BadInputError

    if threads is None:
        return
    if threads < 1:
        raise BadInputError(f"--threads {threads}; it must be at least 1")
    import torch

    torch.set_num_threads(threads)


def _with_baselines(found: Latency, wanted: list[str], server: ServerBaseline | None, target: LoadedModel, settings: LatencySettings) -> Latency:
    from kvbench.timing.baselines import VllmBaseline, add_baseline

    if server is not None:
        found = add_baseline(found, server, target, settings, progress=_tell)
    if "vllm" in wanted:
        found = add_baseline(found, VllmBaseline(target, settings.lengths[-1]), target, settings, progress=_tell)
    return found


def _with_quality(
    found: Latency,
    arms: dict[str, Arm],
    models: tuple[LoadedModel, LoadedModel],
    settings: LatencySettings,
    data: str,
    backs: tuple[int, ...],
    tokens: int | None,
    sequences: int,
    runs: list[Path],
) -> Latency:
    from kvbench.diagnostics.text import heldout_text
    from kvbench.timing.accuracies import accuracies_of
    from kvbench.timing.quality import SUFFIX, QualitySettings, quality_points

    reach = min(int(m.config.max_position_embeddings) for m in models) - SUFFIX
    fitting = [n for n in settings.lengths if n <= reach] or [reach]
    chosen = tokens or fitting[-1]
    comparison = QualitySettings(tokens=chosen, hold_backs=tuple(b for b in backs if b < chosen) if tokens is None else backs)
    comparison.check(reach + SUFFIX)
    manifests = [arm.manifest for arm in arms.values() if arm.manifest]
    ids, record = heldout_text(data, models[1].tokenizer, sequences=sequences, length=chosen + SUFFIX, manifests=manifests)
    recipes: dict[str, dict[str, Any]] = {name: (arm.manifest or {}).get("recipe", {}) for name, arm in arms.items()}
    points = quality_points(
        *models,
        {name: arm.mapper for name, arm in arms.items()},
        recipes,
        ids,
        comparison,
        settings,
        accuracies=accuracies_of(runs),
        progress=_tell,
    )
    note = f"quality: {sequences} sequences of {data}, {record['kept_apart']}; {chosen:,} context tokens, {SUFFIX} scored positions"
    return found.model_copy(update={"quality": points, "notes": (*found.notes, note)})


def _with_memory(found: Latency, arms: dict[str, Arm], models: tuple[LoadedModel, LoadedModel], settings: LatencySettings) -> Latency:
    from kvbench.mappers.ridge import Ridge
    from kvbench.timing.stages import stage_peaks

    mappers = {name: arm.mapper for name, arm in arms.items()}
    recipe = Ridge(k=min(8, models[0].layers))
    return found.model_copy(update={"memory": stage_peaks(*models, mappers, recipe, tokens=settings.lengths[-1], seed=settings.seed)})
