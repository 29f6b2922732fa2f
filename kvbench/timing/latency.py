"""Transfer against the target's own prefill, time to the first token, phase by phase. Terms and formulas: docs/latency.md."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from kvbench.calibration.planning import available_bytes
from kvbench.errors import BadInputError
from kvbench.mappers.base import Mapper
from kvbench.pairs.models import LoadedModel
from kvbench.runs.latency import RE_PREFILL, EndedLength, Latency, LatencyPoint, PhaseTime
from kvbench.scoring.arms import Arm
from kvbench.scoring.engine import TransferEngine
from kvbench.timing import counted, phases
from kvbench.timing.clock import OutOfMemoryError, frozen_garbage, percentiles, repeat
from kvbench.timing.counted import Work
from kvbench.timing.peak import Machine
from kvbench.timing.points import added, device_name, judged_point, phase_time, unsteady

Progress = Callable[[int, int, str], None]
"""Called with pieces done, pieces in all, and what is being done."""
PAPER_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# No product of this many rows is faster than one of that many; longer ones only take longer to time.
PEAK_ROWS = 4096


@dataclass(frozen=True)
class LatencySettings:
    """What is measured.

    Attributes:
        lengths: context tokens, increasing.
        batch_sizes: rows, increasing.
        warmups: runs of each piece that are thrown away.
        repeats: runs of each piece that count.
        hold_back: last context tokens that the target runs itself after a transfer.
        seed: of the token ids and of the order of lengths and pieces.
        with_head: also time the target's plain forward with logits at every position.
        breakdown: also time strip, map, rotate and inject one by one, and the paging of the artifact.
    """

    lengths: tuple[int, ...] = PAPER_LENGTHS
    batch_sizes: tuple[int, ...] = (1,)
    warmups: int = 5
    repeats: int = 30
    hold_back: int = 1
    seed: int = 0
    with_head: bool = True
    breakdown: bool = True

    def check(self, source: LoadedModel, target: LoadedModel) -> None:
        """Refuse before anything is timed.

        Raises:
            BadInputError: as `check_numbers`, or a length beyond the positions of either model.
        """
        self.check_numbers()
        for model in (source, target):
            reach = int(model.config.max_position_embeddings)
            if self.lengths[-1] > reach:
                raise BadInputError(f"length {self.lengths[-1]} is beyond the {reach} positions of '{model.name}'; use lengths up to {reach}")

    def check_numbers(self) -> None:
        """What can be said without the models.

        Raises:
            BadInputError: sizes that are not increasing positive numbers, or a length that hold_back leaves nothing of.
        """
        for name, values in (("lengths", self.lengths), ("batch sizes", self.batch_sizes)):
            if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
                raise BadInputError(f"{name} {','.join(map(str, values)) or '(none)'}: they must be positive and increasing, e.g. 64,256,1024")
        for name, value, least in (("warmups", self.warmups, 0), ("repeats", self.repeats, 1), ("hold_back", self.hold_back, 1)):
            if value < least:
                raise BadInputError(f"{name} = {value}; it must be at least {least}")
        if self.lengths[0] <= self.hold_back:
            raise BadInputError(
                f"length {self.lengths[0]} leaves nothing to transfer when the target runs {self.hold_back} tokens itself; use longer ones"
            )


def measure(
    source: LoadedModel, target: LoadedModel, mappers: Mapping[str, Mapper], settings: LatencySettings, *, progress: Progress | None = None
) -> Latency:
    """Time a pair.

    Every length and batch size, in random order; within each, in random order: the target's prefill, the source's, and every mapper; each piece
    with its own warm-ups, memory given back after it. Running out of memory ends that length for that piece's batch size and is recorded.

    Args:
        source: the model that prefills.
        target: the model that answers.
        mappers: by name, fitted for this pair, or controls that read the source's cache.
        settings: see `LatencySettings`.
        progress: told how far it is.

    Returns:
        Everything measured, ready to be stored with `kvbench.runs.files.write_stored`.

    Raises:
        BadInputError: settings that cannot be measured, or a mapper that reads the target's own cache.
    """
    settings.check(source, target)
    for name, mapper in mappers.items():
        if mapper.reads != "source":
            raise BadInputError(f"mapper '{name}' reads the target's own cache, so there is no transfer to time; leave it out")
        if name in ("target", "source") or name.startswith(RE_PREFILL):
            raise BadInputError(f"a mapper cannot be called '{name}' here; name it with NAME=DIRECTORY")
    run = _Run(source, target, mappers, settings, progress)
    with frozen_garbage():
        return run.everything()


class _Run:
    """One measurement in progress."""

    def __init__(
        self, source: LoadedModel, target: LoadedModel, mappers: Mapping[str, Mapper], settings: LatencySettings, progress: Progress | None
    ) -> None:
        self.source, self.target, self.settings = source, target, settings
        self.arms = {name: Arm(name, "target", mapper) for name, mapper in mappers.items()}
        self.engine = TransferEngine(source, target, list(self.arms.values()), hold_back=settings.hold_back)
        self.sizes = counted.size_of(source), counted.size_of(target)
        self.machine = Machine(target.dtype, target.device)
        self.random = random.Random(settings.seed)
        self.phases: list[PhaseTime] = []
        self.points: list[LatencyPoint] = []
        self.ended: list[EndedLength] = []
        self._progress, self._done = progress, 0
        self._total = 1 + len(settings.lengths) * len(settings.batch_sizes) * (2 + settings.with_head + len(mappers) * (1 + settings.breakdown))

    def everything(self) -> Latency:
        """Measure and assemble."""
        s = self.settings
        order = [(tokens, batch) for batch in s.batch_sizes for tokens in s.lengths]
        self.random.shuffle(order)
        names = [RE_PREFILL, *self.arms]
        self._say("peak rates")
        self.machine.measure(self._shapes())
        for name, arm in self.arms.items() if s.breakdown else ():
            self._page(name, arm.mapper)
        for tokens, batch in order:
            self._length(tokens, batch)
        self._done = self._total
        self._say("done")
        return Latency(
            device=device_name(self.target.device),
            points=tuple(sorted(self.points, key=lambda p: (p.batch, p.tokens, names.index(p.arm), p.cold))),
            source=self.source.name,
            target=self.target.name,
            dtype=str(self.target.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            attention=self.target.attention_backend,
            settings={
                **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(s).items()},
                "order": [list(pair) for pair in order],
                "tokens": "random ids",
            },
            phases=tuple(sorted(self.phases, key=lambda p: (p.batch, p.tokens))),
            matrix_rates=tuple(self.machine.matrix.values()),
            copy_rates=self.machine.copies,
            ended=tuple(sorted(self.ended, key=lambda p: (p.batch, p.tokens))),
            notes=self._notes(),
        )

    def _say(self, what: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, what)
        self._done += 1

    def _shapes(self) -> list[tuple[tuple[int, int, int], str]]:
        """Products of the pair that the peak is measured with: the widest of each model, and of each mapper, at every number of rows."""
        found = []
        for rows in sorted({min(t * b, PEAK_ROWS) for t in self.settings.lengths for b in self.settings.batch_sizes}):
            for size, role in zip(self.sizes, ("source", "target"), strict=True):
                found.append(((rows, *size.inner), f"widest matrix of the {role}"))
            for name, arm in self.arms.items():
                inner = arm.mapper.cost_per_token() // (2 * self.sizes[1].layers * self.sizes[1].kv_width)
                if inner:
                    found.append(((rows, inner, self.sizes[1].kv_width), f"a layer of mapper {name}, on average"))
        return found

    def _length(self, tokens: int, batch: int) -> None:
        """All pieces of one length and batch size."""
        generator = torch.Generator().manual_seed(self.settings.seed + tokens)
        vocabulary = min(int(m.config.vocab_size) for m in (self.source, self.target))
        ids = torch.randint(0, vocabulary, (batch, tokens), generator=generator)
        context = phases.Context(self.source, self.target, ids, self.settings.hold_back)
        pieces: list[tuple[str, Callable[[], None]]] = [
            ("re-prefill", lambda: self._re_prefill(context)),
            ("source prefill", lambda: self._source_prefill(context)),
        ]
        pieces += [(f"transfer, {name}", lambda arm=arm: self._transfer(context, arm)) for name, arm in self.arms.items()]  # type: ignore[misc]
        self.random.shuffle(pieces)
        # What needs most memory comes last, so that running out of it costs nothing else.
        if self.settings.breakdown:
            pieces += [(f"phases, {name}", lambda arm=arm: self._plain(context, arm)) for name, arm in self.arms.items()]  # type: ignore[misc]
        if self.settings.with_head:
            pieces.append(("prefill and LM head", lambda: self._with_head(context)))
        for number, (what, piece) in enumerate(pieces):
            self._say(f"{tokens:,} tokens{f' x {batch}' if batch > 1 else ''}: {what}")
            try:
                self._refuse_hopeless(context, what)
                piece()
            except OutOfMemoryError as error:
                self.ended.append(EndedLength(tokens=tokens, batch=batch, phase=what, reason=str(error)))
                self._done += len(pieces) - number - 1
                break
        self._cold(tokens, batch)

    def _refuse_hopeless(self, context: phases.Context, what: str) -> None:
        """On a CPU the kernel ends the process rather than refuse memory, so what cannot fit is not tried.

        Raises:
            OutOfMemoryError: caches, float32 content and logits alone exceed what is available.
        """
        if context.target.device.type != "cpu":
            return
        source, target = self.sizes
        entries = context.tokens * context.batch
        needed = entries * (source.cache_bytes_per_token + target.cache_bytes_per_token)
        if what.startswith("phases"):
            needed += entries * (4 * source.layers * source.kv_width + 4 * target.layers * target.kv_width + target.cache_bytes_per_token)
        if "LM head" in what:
            needed += entries * int(self.target.config.vocab_size) * target.element_bytes
        if self.target.attention_backend == "eager":
            needed += 4 * context.batch * int(self.target.config.num_attention_heads) * context.tokens**2
        if needed > (free := available_bytes()):
            raise OutOfMemoryError(f"needs at least {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are available")

    def _re_prefill(self, context: phases.Context) -> None:
        body, head = self._timed(lambda: phases.re_prefill(context))
        size, tokens, batch = self.sizes[1], context.tokens, context.batch
        whole = counted.prefill(size, tokens, batch, head_positions=1)
        self._phase("target prefill", context, body, counted.prefill(size, tokens, batch))
        self._phase("target first logits", context, head, Work(2 * batch * size.head_parameters, size.head_parameters * size.element_bytes))
        self._point(RE_PREFILL, context, added(body, head), whole)

    def _with_head(self, context: phases.Context) -> None:
        (seconds,) = self._timed(lambda: phases.prefill_with_head(context))
        work = counted.prefill(self.sizes[1], context.tokens, context.batch, head_positions=context.tokens)
        self._phase("target prefill and LM head", context, seconds, work)

    def _source_prefill(self, context: phases.Context) -> None:
        (seconds,) = self._timed(lambda: phases.source_prefill(context))
        self._phase("source prefill", context, seconds, counted.prefill(self.sizes[0], context.prefix, context.batch))

    def _transfer(self, context: phases.Context, arm: Arm) -> None:
        source, target = self.sizes
        kv = self.source.prefill(context.rows())
        moved, answered = self._timed(lambda: phases.transfer(context, arm, self.engine, kv))
        mapping = counted.transferring(arm.mapper, source, target, context.prefix, context.batch)
        first = counted.prefill(target, context.hold_back, context.batch, behind=context.prefix, head_positions=1)
        self._phase("transfer", context, moved, mapping, arm.name)
        self._phase("first token", context, answered, first, arm.name)
        self._point(arm.name, context, added(moved, answered), mapping + first)

    def _plain(self, context: phases.Context, arm: Arm) -> None:
        source, target = self.sizes
        kv = self.source.prefill(context.rows())
        columns = self._timed(lambda: phases.plain_phases(context, arm.mapper, kv))
        tokens, batch = context.prefix, context.batch
        works = (
            counted.stripping(source, tokens, batch),
            counted.mapping(arm.mapper, source, target, tokens, batch),
            counted.rotating(target, tokens, batch),
            counted.injecting(target, tokens, batch),
        )
        for name, seconds, work in zip(phases.PLAIN_PHASES, columns, works, strict=True):
            self._phase(name, context, seconds, work, arm.name)

    def _page(self, name: str, mapper: Mapper) -> None:
        size = sum(tensor.numel() for _, tensor in mapper.tensors()) * self.sizes[1].element_bytes
        if not size:
            return
        (seconds,) = repeat(
            phases.paging(mapper, self.target.device, self.target.dtype), warmups=1, repeats=min(self.settings.repeats, 5), device=self.target.device
        )
        self.phases.append(phase_time("page artifact", name, 0, 1, seconds, None, size, None))

    def _cold(self, tokens: int, batch: int) -> None:
        """Cold points: the source's prefill on top of each warm one, repeat by repeat."""
        prefill = next((p for p in self.phases if (p.name, p.tokens, p.batch) == ("source prefill", tokens, batch)), None)
        if prefill is None:
            return
        work = counted.prefill(self.sizes[0], tokens - self.settings.hold_back, batch)
        for warm in [p for p in self.points if (p.tokens, p.batch) == (tokens, batch) and p.arm in self.arms]:
            seconds = added(prefill.seconds, warm.seconds)
            floor = (warm.floor_seconds or 0.0) + self.machine.floor(work)
            p = percentiles(seconds)
            self.points.append(
                LatencyPoint(
                    arm=warm.arm, tokens=tokens, batch=batch, cold=True, seconds=seconds, p50_seconds=p.p50, p95_seconds=p.p95, p99_seconds=p.p99,
                    operations=(warm.operations or 0) + work.operations, floor_seconds=floor, achieved=floor / p.p50,
                )
            )  # fmt: skip

    def _timed(self, work: Callable[[], list[float]]) -> list[tuple[float, ...]]:
        return repeat(work, warmups=self.settings.warmups, repeats=self.settings.repeats, device=self.target.device)

    def _phase(self, name: str, context: phases.Context, seconds: tuple[float, ...], work: Work, arm: str | None = None) -> None:
        self.phases.append(phase_time(name, arm, context.tokens, context.batch, seconds, work.operations, work.bytes_moved, self.machine.floor(work)))

    def _point(self, arm: str, context: phases.Context, seconds: tuple[float, ...], work: Work) -> None:
        self.points.append(judged_point(arm, context.tokens, context.batch, seconds, work, self.machine))

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.target.device.type == "cpu":
            notes.append(
                "'page artifact' is reading the memory-mapped artifact into the cache dtype, from the operating system's page cache after the first time"
            )
        if self.source.dtype != self.target.dtype:
            notes.append(f"the source runs in {self.source.dtype}, the target in {self.target.dtype}")
        busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        if self.target.device.type == "cpu" and busy > torch.get_num_threads() + 1:
            notes.append(
                f"other work ran on this machine meanwhile (load {busy:.1f} with {torch.get_num_threads()} threads here): measure again when it is idle"
            )
        notes += unsteady(self.points)
        notes += [f"{point.arm} at {point.tokens:,} tokens: {point.error}" for point in self.points if point.error]
        return tuple(notes)
