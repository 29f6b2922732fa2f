"""`kvbench calibrate`: run both models over text and store the moments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli import options as opt


def calibrate(
    source: opt.Source,
    target: opt.Target,
    data: Annotated[
        str, typer.Option(help="Text: .jsonl, .txt or .parquet file (:column), hub data set id[:config][:split][:column], or embedded:world.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    sequences: Annotated[int, typer.Option(help="Sequences to fit on.")] = 500,
    heldout: Annotated[int, typer.Option(help="Held-out sequences, from other documents.")] = 50,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 1024,
    stride: Annotated[int, typer.Option(help="Every stride-th token is a row.")] = 4,
    seed: Annotated[int, typer.Option(help="Shuffles the documents.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle documents, or take them in file order.")] = True,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.")] = 8,
    source_layers: Annotated[str | None, typer.Option(help="Candidate source layers, e.g. 0,4,8; default all.")] = None,
    every_layer: Annotated[int, typer.Option(help="Only every n-th source layer is a candidate.")] = 1,
    separate_passes: Annotated[bool, typer.Option("--separate-passes", help="Keys and values in passes of their own: half the memory.")] = False,
    rotated: Annotated[bool, typer.Option("--rotated", help="Also keep moments of rotated keys, for the content-space ablation.")] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="Time between checkpoints.")] = 60.0,
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
) -> None:
    """Run both models over text and store what every closed-form mapper needs. The same command goes on after it was killed."""
    opt.quiet_libraries()
    from kvbench.calibration.corpus import load_texts, pack
    from kvbench.calibration.harvest import Harvest, HarvestSettings
    from kvbench.pairs.locate import load_tokenizer, resolve
    from kvbench.ranks import join
    from kvbench.storage import check_writable

    ranks = join(device, device_map)
    device = ranks.device(device)
    ranks.on_main(lambda: check_writable(out, overwrite=overwrite))
    # Text and sizes first: a mistake there should not cost the loading of two models.
    opt.refuse_beyond_positions("--seq-len", seq_len, (source, source_revision), (target, target_revision), trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(resolve(target, target_revision), trust_remote_code=trust_remote_code)
    blocks = pack(load_texts(data), tokenizer, sequences=sequences, heldout=heldout, seq_len=seq_len, seed=seed if shuffle else None)
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
    settings = HarvestSettings(
        stride=stride,
        batch_size=batch_size,
        source_layers=_layers(source_layers, every_layer, models[0].layers),
        rotated=rotated,
        separate_passes=separate_passes,
    )
    record = {"name": data, "seed": seed if shuffle else None}
    harvest = Harvest(models[0], models[1], blocks, record, settings, out, checkpoint_seconds=checkpoint_seconds, ranks=ranks)
    plan = harvest.memory_plan()
    opt.say(plan.describe())
    plan.refuse_if_too_large()
    if harvest.partial.exists():
        opt.say(f"going on from the checkpoint in '{harvest.partial}'")
    started = time.perf_counter()
    with opt.progress_bar() as bar:
        task = bar.add_task("calibrating", total=0, unit="tokens", speed="")
        first: list[int] = []

        def step(done: int, total: int) -> None:
            first.append(done) if not first else None
            speed = (done - first[0]) / max(1e-9, time.perf_counter() - started)
            bar.update(task, completed=done, total=total, speed=f"{speed:,.0f} tokens/s" if speed else "")

        harvest.run(step, overwrite=overwrite)
    opt.say(f"calibrated in {time.perf_counter() - started:.1f} s")
    if ranks.main:
        print(out)


def _layers(named: str | None, every: int, available: int) -> tuple[int, ...] | None:
    from kvbench.errors import BadInputError

    if every < 1:
        raise BadInputError(f"--every-layer {every}; it must be at least 1")
    if named is None:
        return tuple(range(0, available, every)) if every > 1 else None
    try:
        return tuple(int(part) for part in named.split(","))
    except ValueError as error:
        raise BadInputError(f"--source-layers '{named}' is not a comma-separated list of layer numbers") from error
