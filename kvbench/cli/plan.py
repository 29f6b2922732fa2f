"""`kvbench plan`: what a pair will need, from its configurations alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.timing.plan import Planned, PlanSettings, Rates


def plan(
    source: Annotated[str, typer.Argument(help=f"Model that prefills: {opt.MODEL}; a directory with nothing but config.json will do.")],
    target: Annotated[str, typer.Argument(help=f"Model that answers: {opt.MODEL}; a directory with nothing but config.json will do.")],
    recipe: Annotated[str, typer.Option(help="ridge, head_local, attn_repair, low_rank, residual or mlp.")] = "ridge",
    k: Annotated[str | None, typer.Option(help="Source layers per target layer, or all; default 8, or all where the source has fewer.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of low_rank.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Units of mlp layers (1024), or the bottleneck of residual (256).")] = None,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 500,
    heldout: Annotated[int, typer.Option(help="Held-out sequences.")] = 50,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    stride: Annotated[int, typer.Option(help="Every stride-th token is a row.")] = 4,
    lengths: Annotated[str, typer.Option(help="Context tokens to plan for.")] = "1024,8192,32768",
    batch_size: Annotated[int, typer.Option(help="Contexts at once in an evaluation.")] = 8,
    arms: Annotated[int, typer.Option(help="Arms of an evaluation.")] = 4,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: bfloat16, float16 or float32.")] = "bfloat16",
    tflops: Annotated[float | None, typer.Option(help="Matrix rate of the machine planned for, Tflop/s; default measured here on the CPU.")] = None,
    tflops64: Annotated[float | None, typer.Option(help="Its float64 rate (solving); default half of --tflops.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Its memory bandwidth, GB/s; default not counted.")] = None,
    times: Annotated[bool, typer.Option("--times/--no-times", help="Estimate times.")] = True,
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    json: opt.Json = False,
) -> None:
    """Sizes of moments, mapper, caches and peaks, and times as estimates, before anything is downloaded or run."""
    opt.quiet_libraries()
    from dataclasses import replace

    from kvbench.cli.latency import integers
    from kvbench.cli.plan_output import as_json, print_plan
    from kvbench.errors import BadInputError
    from kvbench.pairs.geometry import refusals
    from kvbench.pairs.locate import load_config, resolve
    from kvbench.timing.plan import DEFAULT_K, PlanSettings, plan_pair, planned

    if k is not None and k != "all" and not k.isdigit():
        raise BadInputError(f"--k '{k}'; give a number of source layers, or all")
    settings = PlanSettings(
        k=k if k == "all" else int(k or DEFAULT_K),
        recipe=recipe,
        rank=rank,
        hidden=hidden,
        sequences=sequences,
        heldout=heldout,
        seq_len=seq_len,
        stride=stride,
        dtype=dtype,
        lengths=integers("lengths", lengths),
        batch=batch_size,
        arms=arms,
    )
    configs = [
        load_config(resolve(name, revision), trust_remote_code=trust_remote_code)
        for name, revision in ((source, source_revision), (target, target_revision))
    ]
    models = [planned(config) for config in configs]
    if k is None:
        settings = replace(settings, k=min(DEFAULT_K, models[0].geometry.layers))
    if tflops is None and (tflops64 is not None or bandwidth is not None):
        raise BadInputError("--tflops64 and --bandwidth describe the machine of --tflops; give that too")
    settings.check(models[0].geometry)
    rates = _rates(tflops, bandwidth, tflops64, dtype) if times else None
    found = plan_pair(models[0], models[1], settings, rates)
    notes = _notes((source, target), models, settings)
    for name, config in zip((source, target), configs, strict=True):
        notes += [f"'{name}' would be refused: {refusal.value}: {refusal.reason}" for refusal in refusals(config)]
    if json:
        print(as_json(source, target, settings, found, rates, notes))
    else:
        print_plan(source, target, settings, found, rates, notes)


def _rates(tflops: float | None, bandwidth: float | None, tflops64: float | None, dtype: str) -> Rates:
    """Given, or measured on this machine's CPU."""
    from kvbench.timing.plan import given_rates

    if tflops is not None:
        return given_rates(tflops, bandwidth, tflops64)
    opt.say("measuring this machine's matrix rate and bandwidth; give --tflops to plan for another machine")
    from kvbench.timing.measured_rates import measured_rates

    return measured_rates(dtype)


def _notes(names: tuple[str, str], models: list[Planned], settings: PlanSettings) -> list[str]:
    """What the reader must know: shapes that do not match, unknown sizes, lengths beyond the positions."""
    source, target = (m.geometry for m in models)
    notes = []
    if (source.kv_heads, source.head_dim) != (target.kv_heads, target.head_dim):
        notes.append(
            f"the models differ in KV shape ({source.kv_heads} x {source.head_dim} and {target.kv_heads} x {target.head_dim}); no published method covers that"
        )
    for name, model in zip(names, models, strict=True):
        if model.geometry.parameters is None:
            notes.append(f"the size of '{name}' cannot be told from its configuration; its weights and prefill times are left out")
        if model.geometry.max_positions is not None and settings.lengths[-1] > model.geometry.max_positions:
            notes.append(f"{settings.lengths[-1]:,} tokens are beyond the {model.geometry.max_positions:,} positions of '{name}'")
    return notes
