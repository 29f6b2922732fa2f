"""Options and talk that several commands share."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.ranks import is_main

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvbench.pairs.models import LoadedModel

MODEL = "hub id, directory, .gguf file, or embedded:source|target|stranger"

Source = Annotated[str, typer.Argument(help=f"Model that prefills: {MODEL}.")]
Target = Annotated[str, typer.Argument(help=f"Model that answers: {MODEL}.")]
SourceRevision = Annotated[str | None, typer.Option(help="Hub revision of the source.")]
TargetRevision = Annotated[str | None, typer.Option(help="Hub revision of the target.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="torch device of both models.")]
DeviceMap = Annotated[str | None, typer.Option(help="accelerate device map, e.g. auto, to shard a model over several devices.")]
Attention = Annotated[str, typer.Option(help="Attention backend: sdpa or eager.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the model repositories carry.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]
Gates = Annotated[bool, typer.Option("--gates/--no-gates", help="Check the loaded models first.")]

Mismatched = Annotated[bool, typer.Option("--allow-mismatched", help="Take models that differ in KV heads or head width (experimental).")]


def say(text: str) -> None:
    """Talk goes to stderr; stdout is for data. Of several processes only the first talks."""
    if is_main():
        print(text, file=sys.stderr, flush=True)


def quiet_libraries() -> None:
    """Keep the libraries' banners and bars out of the talk; their warnings and errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name in ("lm_eval", "lm_eval.api.task", "lm_eval.evaluator", "lm_eval.models.huggingface", "lm_eval.tasks"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def refuse_beyond_positions(what: str, tokens: int | None, *models: tuple[str, str | None], trust_remote_code: bool = False) -> None:
    """Refuse contexts that a model has no positions for, from configurations alone.

    Args:
        what: the option, for the message.
        tokens: asked for; None is fine.
        models: names and revisions.
        trust_remote_code: as in loading.

    Raises:
        BadInputError: below 1, or beyond the positions of a model.
    """
    from kvbench.errors import BadInputError
    from kvbench.pairs.geometry import text_config_of
    from kvbench.pairs.locate import load_config, resolve

    if tokens is None:
        return
    if tokens < 1:
        raise BadInputError(f"{what} {tokens}; it is a number of tokens, at least 1")
    for name, revision in models:
        limit = getattr(text_config_of(load_config(resolve(name, revision), trust_remote_code=trust_remote_code)), "max_position_embeddings", None)
        if limit is not None and tokens > limit:
            raise BadInputError(f"{what} {tokens:,}, but '{name}' has {limit:,} positions")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr with speed and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not is_main()) as bar:
        yield bar


def scoring_bar(bar: Progress, prefix: str) -> Callable[[str, int], AbstractContextManager[Callable[[int], None]]]:
    """Bars of a scorer inside a rich progress display."""

    @contextmanager
    def make(description: str, total: int) -> Iterator[Callable[[int], None]]:
        task = bar.add_task(f"{prefix}{description}", total=total, unit="contexts", speed="")
        yield lambda n: bar.advance(task, n)

    return make


def load_pair(
    source: str,
    target: str,
    *,
    source_revision: str | None,
    target_revision: str | None,
    dtype: str,
    device: str,
    device_map: str | None,
    attention: str,
    trust_remote_code: bool,
    gates: bool,
    allow_mismatched: bool = False,
) -> tuple[LoadedModel, LoadedModel]:
    """Check, load and gate a pair, saying what is going on.

    Raises:
        KVBenchError: whatever stops it.
    """
    from kvbench.pairs.check import check_pair
    from kvbench.pairs.gates import gate_rows, run_gates
    from kvbench.pairs.models import load_model

    report = check_pair(
        source,
        target,
        source_revision=source_revision,
        target_revision=target_revision,
        allow_mismatched=allow_mismatched,
        trust_remote_code=trust_remote_code,
    )
    for row in report.rows:
        if row.status == "warn":
            say(f"warning: {row.name}: source {row.source}, target {row.target}. {row.detail} {row.remedy}".rstrip())
    report.raise_if_refused()
    loaded = []
    for name, revision in ((source, source_revision), (target, target_revision)):
        say(f"loading {name}")
        loaded.append(
            load_model(
                name, revision=revision, dtype=dtype, device=device, attention=attention, device_map=device_map, trust_remote_code=trust_remote_code
            )
        )
    if gates:
        outcome = run_gates(loaded[0], loaded[1])
        for gate, model, figure, bound, result in gate_rows(outcome):
            say(f"gate {gate:<10} {model}: {figure} ({bound}) {result}")
        outcome.raise_if_failed()
    return loaded[0], loaded[1]
