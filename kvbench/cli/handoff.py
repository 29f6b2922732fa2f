"""`kvbench handoff`: conversations that change models on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli import options as opt

if TYPE_CHECKING:
    from kvbench.pairs.models import LoadedModel
    from kvbench.runs.schema import ArmSpec
    from kvbench.scoring.arms import Answering
    from kvbench.scoring.conversations import Script
    from kvbench.scoring.handoff_protocols import HandoffMapper

OWN_CACHE_CONTROLS = ("oracle", "shuffled")


def handoff(
    source: opt.Source,
    target: opt.Target,
    mapper: Annotated[
        list[str], typer.Option(help="Source to target: artifact directory, NAME=DIRECTORY, embedded:ridge, or a control; repeat for more.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write, a run of `kvbench evaluate` or a new one; the same command resumes it.")],
    back_mapper: Annotated[
        list[str] | None,
        typer.Option(help="Target to source, for `alternate`: one for all mappers, or one per mapper; a control is its own way back."),
    ] = None,
    protocol: Annotated[list[str] | None, typer.Option(help="per_turn, once or alternate; repeat for more. Default per_turn and once.")] = None,
    data: Annotated[str | None, typer.Option(help="coqa or embedded:turns; default embedded:turns for embedded pairs, else coqa.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with coqa/test.jsonl; no network is used then.")] = None,
    conversations: Annotated[int | None, typer.Option(help="Take so many, at random, nested by seed; default all.")] = None,
    max_turns: Annotated[int | None, typer.Option(help="First turns only.")] = None,
    history: Annotated[str, typer.Option(help="gold or generated: which answers the history repeats.")] = "gold",
    handoff_turn: Annotated[int, typer.Option(help="Turn at which `once` transfers; the source answers before it.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; it ends with the line.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Conversations per batch.")] = 8,
    hold_back: Annotated[int, typer.Option(help="Last context tokens that the answering model runs itself.")] = 1,
    max_length: Annotated[int | None, typer.Option(help="Position limit; default the smaller of both models'.")] = None,
    seed: Annotated[int, typer.Option(help="Choice of conversations, and resampling.")] = 0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    device_map: opt.DeviceMap = None,
    attention: opt.Attention = "sdpa",
    source_revision: opt.SourceRevision = None,
    target_revision: opt.TargetRevision = None,
    trust_remote_code: opt.Trust = False,
    gates: opt.Gates = True,
    json: opt.Json = False,
) -> None:
    """Let source and target share conversations over a transferred cache; F1 by turn, drift against the target alone, and its slope."""
    from kvbench.cli.handoff_output import print_figures, write_figures
    from kvbench.errors import BadInputError
    from kvbench.pairs.pins import pin
    from kvbench.runs.files import write_stored
    from kvbench.runs.provenance import collect
    from kvbench.runs.schema import ModelSpec
    from kvbench.scoring.conversations import fingerprint, load_conversations, tokenise
    from kvbench.scoring.drift import as_stored, summarise
    from kvbench.scoring.engine import Costs
    from kvbench.scoring.handoff import HandoffSpec, HandoffStore, run_handoff
    from kvbench.scoring.handoff_protocols import PROTOCOLS, protocols
    from kvbench.storage import check_writable, utc_now

    opt.quiet_libraries()
    begun = utc_now()
    if data is None:
        data = "embedded:turns" if data_dir is None and all(name.startswith("embedded:") for name in (source, target)) else "coqa"
    names = list(dict.fromkeys(protocol or ["per_turn", "once"]))
    if unknown := [name for name in names if name not in PROTOCOLS]:
        raise BadInputError(f"unknown protocol '{unknown[0]}'; use {', '.join(PROTOCOLS)}")
    if history not in ("gold", "generated"):
        raise BadInputError(f"--history {history}; use gold or generated")
    for option, value in (("handoff-turn", handoff_turn), ("max-new-tokens", max_new_tokens), ("batch-size", batch_size), ("hold-back", hold_back)):
        if value < 1:
            raise BadInputError(f"--{option} {value}; it must be at least 1")
    check_writable(out, overwrite=True)
    talks = load_conversations(data, data_dir, count=conversations, max_turns=max_turns, seed=seed)
    longest = max(talk.turns for talk in talks)
    if "once" in names and handoff_turn > longest:
        raise BadInputError(f"--handoff-turn {handoff_turn}, but the longest conversation has {longest} turns; hand over earlier")
    pairs = _ways(mapper, back_mapper or [], "alternate" in names)
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
    )
    mappers, there, back = _mappers(pairs, *models)
    reach = min(int(m.config.max_position_embeddings) for m in models)
    reach = reach if max_length is None else min(reach, max_length)
    gold = history == "gold"
    scripts = [tokenise(talk, models[1].tokenizer, limit=reach, answer_room=max_new_tokens, gold_history=gold) for talk in talks]
    notes = _notes(scripts, reach)
    for note in notes:
        opt.say(f"warning: {note}")
    spec = HandoffSpec(
        source=ModelSpec(name=models[0].name, revision=models[0].ref.revision, pin=pin(models[0])),
        target=ModelSpec(name=models[1].name, revision=models[1].ref.revision, pin=pin(models[1])),
        mappers=tuple(there),
        back_mappers=tuple(back),
        protocols=tuple(names),
        data=data,
        data_fingerprint=fingerprint(talks),
        conversations=len(talks),
        max_turns=max_turns,
        history="gold" if gold else "generated",
        handoff_turn=handoff_turn,
        hold_back=hold_back,
        max_new_tokens=max_new_tokens,
        max_length=reach,
        batch_size=batch_size,
        dtype=str(models[1].dtype).removeprefix("torch."),
        device=device,
        attention=attention,
    )
    store = HandoffStore.start(out / "handoff", spec)
    by_role: dict[Answering, LoadedModel] = {"source": models[0], "target": models[1]}
    costs = Costs()
    started = time.perf_counter()
    with opt.progress_bar() as bar:
        step = bar.add_task("handing over", total=sum(script.turns for script in scripts), unit="turns", speed="")
        answers = run_handoff(
            scripts,
            store,
            spec,
            by_role,
            lambda: protocols(names, mappers, by_role, costs, handoff_turn=handoff_turn, shared_history=gold),
            progress=lambda n: bar.advance(step, n),
        )
    figures = summarise(answers, handoff_turn=handoff_turn, gold_history=gold, seed=seed)
    stored = as_stored(figures)
    write_stored(out / "handoff.json", stored)
    cost = {"seconds": round(time.perf_counter() - started, 3), "tokens_mapped": costs.mapped}
    cost |= {f"tokens_run_{role}": count for role, count in costs.prefilled.items()}
    write_stored(store.path / "provenance.json", collect(started_utc=begun, cost=cost, notes=notes))
    write_figures(store.path, figures, stored)
    print_figures(f"{source} -> {target}", figures, as_json=json)
    opt.say(
        f"ran {costs.prefilled['source']:,} source and {costs.prefilled['target']:,} target tokens, mapped {costs.mapped:,}, in {cost['seconds']:.0f} s; "
        f"answers, tables and figures: {store.path}"
    )
    if not json:
        print(out / "handoff.json")


def _ways(mappers: list[str], back: list[str], alternate: bool) -> list[tuple[str, str, str | None]]:
    """(name, there, back) per mapper, as given on the command line.

    Raises:
        BadInputError: a control that has no meaning here, a doubled name, or mappers back that do not match.
    """
    from kvbench.errors import BadInputError
    from kvbench.mappers.controls import CONTROLS

    if back and not alternate:
        raise BadInputError("--back-mapper is for the protocol 'alternate'; add --protocol alternate, or leave it out")
    found: list[tuple[str, str, str | None]] = []
    fitted = [m for m in mappers if m not in CONTROLS]
    if len(back) not in (0, 1, len(fitted)):
        raise BadInputError(
            f"{len(back)} --back-mapper for {len(fitted)} fitted --mapper; give one for all of them, or one for each in the same order"
        )
    returns = iter(back * len(fitted) if len(back) == 1 else back)
    for item in mappers:
        if item in OWN_CACHE_CONTROLS:
            raise BadInputError(f"control '{item}' is not an arm of a handoff; the target alone is its oracle, use identity, zero, raw or random")
        label, separator, location = item.partition("=")
        where = location if separator else item
        found.append(
            (label if separator else (item if item in CONTROLS else Path(item).name), where, item if item in CONTROLS else next(returns, None))
        )
    if alternate and (lost := [name for name, _, backward in found if backward is None]):
        raise BadInputError(f"protocol 'alternate' needs a mapper from target to source for '{lost[0]}'; give one with --back-mapper")
    names = [name for name, _, _ in found]
    if doubled := [name for name in names if names.count(name) > 1 or name in ("target", "source")]:
        raise BadInputError(f"two arms would be called '{doubled[0]}'; name them with --mapper NAME=DIRECTORY")
    return found


def _mappers(
    ways: list[tuple[str, str, str | None]], source: LoadedModel, target: LoadedModel
) -> tuple[list[HandoffMapper], list[ArmSpec], list[ArmSpec]]:
    """Mappers in both directions, and how they are recorded."""
    from kvbench.scoring.arms import mapper_arm
    from kvbench.scoring.handoff_protocols import HandoffMapper
    from kvbench.scoring.run import arm_spec

    found, there, back = [], [], []
    for name, forward, backward in ways:
        arm = mapper_arm(forward, source, target, name=name)
        there.append(arm_spec(arm, forward))
        returning = None
        if backward is not None:
            # The same check the other way round: fitted from the target to the source.
            returning = mapper_arm(backward, target, source, name=name)
            back.append(arm_spec(returning, backward))
        found.append(HandoffMapper(name, arm.mapper, returning.mapper if returning else None))
    return found, there, back


def _notes(scripts: list[Script], reach: int) -> list[str]:
    """What did not fit the position limit."""
    cut, dropped = [s.cut for s in scripts if s.cut], [s.dropped for s in scripts if s.dropped]
    notes = []
    if cut:
        notes.append(
            f"{len(cut)} of {len(scripts)} stories were cut on the left, by {sum(cut)} tokens in all, so that their last turn fits {reach} positions"
        )
    if dropped:
        notes.append(f"{sum(dropped)} turns of {len(dropped)} conversations were left out: they do not fit {reach} positions")
    return notes
