"""The calibration pass: both models over the same tokens, moments accumulated, resumable at any moment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.moments import CrossMoments, MomentAccumulator
from kvbench.calibration.planning import MemoryPlan, plan
from kvbench.calibration.sequences import save_tokens
from kvbench.errors import BadInputError
from kvbench.kv.capture import finite_or_raise
from kvbench.kv.content import RotatedKV
from kvbench.pairs.models import LoadedModel
from kvbench.pairs.pins import pin
from kvbench.ranks import ALONE, Ranks
from kvbench.storage import FORMAT_VERSION, atomic_directory, check_writable, dump_json, utc_now, versions, write_atomic

CHUNK_ROWS = 4096
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class HarvestSettings:
    """What decides the moments, bit for bit.

    Attributes:
        stride: every stride-th token is a row.
        batch_size: sequences per forward pass.
        source_layers: candidate source layers, or None for all.
        rotated: also keep moments of rotated keys (for the content-space ablation).
        separate_passes: keys and values in passes of their own, at half the memory and twice the forward passes.
    """

    stride: int = 4
    batch_size: int = 8
    source_layers: tuple[int, ...] | None = None
    rotated: bool = False
    separate_passes: bool = False


class Harvest:
    """Calibrates one pair into a directory.

    Args:
        source: the model that prefills.
        target: the model that answers.
        blocks: packed tokens.
        data: what to record of the data (name, seed, ...).
        settings: see `HarvestSettings`.
        out: directory to write; `<out>.partial` holds the checkpoint until then.
        checkpoint_seconds: time between checkpoints.
        ranks: processes that share the work; each takes every n-th chunk, their sums are added, process 0 writes.

    Raises:
        BadInputError: layers or sizes that do not suit the pair, too large a memory plan, or a checkpoint of another calibration.
    """

    def __init__(
        self,
        source: LoadedModel,
        target: LoadedModel,
        blocks: TokenBlocks,
        data: dict[str, Any],
        settings: HarvestSettings,
        out: Path,
        *,
        checkpoint_seconds: float = 60.0,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.source, self.target, self.blocks, self.settings, self.out = source, target, blocks, settings, out
        self.layers = self._candidates()
        self.kinds = ("k", "v", "k_rotated") if settings.rotated else ("k", "v")
        self.px = len(self.layers) * source.kv_heads * source.head_dim
        self.py = target.layers * target.kv_heads * target.head_dim
        self._checkpoint_seconds = checkpoint_seconds
        self.partial = out.with_name(out.name + ".partial")
        self.manifest: dict[str, Any] = {
            "format": "kvbench-moments",
            "format_version": FORMAT_VERSION,
            "source": pin(source),
            "target": pin(target),
            "source_layers": list(self.layers),
            "kinds": list(self.kinds),
            "data": {
                **data,
                "fingerprint": blocks.fingerprint(),
                "sequences": int(blocks.fit.shape[0]),
                "heldout_sequences": int(blocks.heldout.shape[0]),
                "seq_len": int(blocks.fit.shape[1]),
                "fit_documents": blocks.fit_documents,
                "heldout_documents": blocks.heldout_documents,
                "stride": settings.stride,
                "rows": int(blocks.fit.shape[0] * len(range(0, blocks.fit.shape[1], settings.stride))),
            },
            "settings": {**asdict(settings), "source_layers": list(self.layers)},
            **({"processes": ranks.size} if ranks.size > 1 else {}),
        }
        identity = {**self.manifest, "threads": torch.get_num_threads(), "device": source.device.type if ranks.size > 1 else str(source.device)}
        self._identity = hashlib.sha256(dump_json(identity).encode()).hexdigest()

    def _candidates(self) -> tuple[int, ...]:
        s = self.settings
        if s.stride < 1 or s.batch_size < 1:
            raise BadInputError(f"stride = {s.stride}, batch size = {s.batch_size}; both must be at least 1")
        layers = tuple(range(self.source.layers)) if s.source_layers is None else s.source_layers
        wrong = [layer for layer in layers if not 0 <= layer < self.source.layers]
        if wrong or not layers or len(set(layers)) != len(layers):
            raise BadInputError(
                f"source layers {list(layers)}: '{self.source.name}' has layers 0 to {self.source.layers - 1}, each may be named once"
            )
        return tuple(sorted(layers))

    def memory_plan(self) -> MemoryPlan:
        """Sizes, from configurations alone."""
        weights = sum(
            p.numel() * p.element_size()
            for m in {id(self.source.model): self.source.model, id(self.target.model): self.target.model}.values()
            for p in m.parameters()
        )
        at_once = 1 if self.settings.separate_passes else len(self.kinds)
        return plan(px=self.px, py=self.py, kinds=len(self.kinds), at_once=at_once, chunk_rows=CHUNK_ROWS, models=weights)

    def run(self, progress: Progress | None = None, *, overwrite: bool = False) -> Path:
        """Calibrate, or go on from the last checkpoint.

        Args:
            progress: called with (tokens done, tokens in all).
            overwrite: replace a finished calibration at `out`.
        """
        self.ranks.agree("pair or calibration text", self._identity)
        self.ranks.on_main(lambda: check_writable(self.out, overwrite=overwrite))
        self.ranks.together(self._open_partial)
        passes = [(kind,) for kind in self.kinds] if self.settings.separate_passes else [self.kinds]
        steps = [(kinds, part) for kinds in passes for part in ("fit", "heldout")]
        tokens = [len(kinds) and getattr(self.blocks, part).size for kinds, part in steps]
        done_before = 0
        for (kinds, part), size in zip(steps, tokens, strict=True):
            if not self.ranks.on_main(partial(self._has_results, part, kinds)):
                self._run_part(part, kinds, partial(_advance, progress, done_before, sum(tokens)))
            done_before += size
            if progress:
                progress(done_before, sum(tokens))
        self.ranks.on_main(lambda: self._finish(overwrite))
        shutil.rmtree(self.partial, ignore_errors=True)
        return self.out

    def _open_partial(self) -> None:
        identity_file = self.partial / "identity"
        if identity_file.exists() and identity_file.read_text() != self._identity:
            stored = json.loads((self.partial / "manifest.json").read_text())
            raise BadInputError(
                f"'{self.partial}' holds an unfinished calibration with other settings ({_difference(stored, self.manifest)}); delete it or choose another --out"
            )
        self.partial.mkdir(parents=True, exist_ok=True)
        write_atomic(self.partial / "manifest.json", dump_json(self.manifest))
        write_atomic(identity_file, self._identity)

    def _has_results(self, part: str, kinds: Sequence[str]) -> bool:
        return all(self._result_file(part, kind).exists() for kind in kinds)

    def _result_file(self, part: str, kind: str) -> Path:
        return self.partial / f"{part}.{kind}.safetensors"

    def _run_part(self, part: str, kinds: Sequence[str], progress: Callable[[int], None]) -> None:
        rows: np.ndarray[Any, np.dtype[np.int32]] = getattr(self.blocks, part)
        accumulators = {kind: MomentAccumulator(self.px, self.py) for kind in kinds}
        of_rank = f".rank{self.ranks.rank}" if self.ranks.size > 1 else ""
        checkpoint = self.partial / f"{part}.{'-'.join(kinds)}{of_rank}.checkpoint"
        start = _restore(checkpoint, accumulators)
        shifts_open = self._share_shifts(accumulators)
        size, saved, done = self.settings.batch_size, time.monotonic(), 0
        own = self._chunks(len(rows), rows.shape[1])[self.ranks.rank :: self.ranks.size]
        for number, chunk in enumerate(own):
            following = min(chunk[-1] + size, len(rows))
            if following <= start:
                done += following - chunk[0]
                continue
            pending: dict[str, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in kinds}
            for first in chunk:
                batch = rows[first : first + size]
                for kind, pair in self._features(batch, kinds, f"batch at {part} sequence {first}").items():
                    pending[kind].append(pair)
                done += batch.shape[0]
                progress(min(done * self.ranks.size, len(rows)) * rows.shape[1])
            joined = {kind: (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])) for kind, pairs in pending.items()}
            if shifts_open:
                self._set_shifts(accumulators, joined)
                shifts_open = False
            for kind, (x, y) in joined.items():
                accumulators[kind].update(x, y)
            # Chunks end at fixed places, checkpoints only between chunks: a resumed run adds the same numbers in the same order.
            if number + 1 < len(own) and time.monotonic() - saved >= self._checkpoint_seconds:
                _store(checkpoint, accumulators, following)
                saved = time.monotonic()
        if shifts_open:  # fewer chunks than processes
            self._set_shifts(accumulators, {})
        if self.ranks.size > 1:
            for accumulator in accumulators.values():
                accumulator.add_up(self.ranks)

        def save() -> None:
            for kind, accumulator in accumulators.items():
                _save_result(self._result_file(part, kind), accumulator.result(), f"{part}.{kind}.")

        self.ranks.on_main(save)
        shutil.rmtree(checkpoint, ignore_errors=True)

    def _chunks(self, sequences: int, seq_len: int) -> list[list[int]]:
        """First sequences of the batches of each chunk: at least `CHUNK_ROWS` rows, the last one less. Chunks do not depend on the processes."""
        size, per_sequence = self.settings.batch_size, len(range(0, seq_len, self.settings.stride))
        chunks: list[list[int]] = []
        current: list[int] = []
        for first in range(0, sequences, size):
            current.append(first)
            if (min(first + size, sequences) - current[0]) * per_sequence >= CHUNK_ROWS or first + size >= sequences:
                chunks.append(current)
                current = []
        return chunks

    def _share_shifts(self, accumulators: dict[str, MomentAccumulator]) -> bool:
        """Hand the shifts of a process that goes on from a checkpoint to those that have none; whether all are still without."""
        if self.ranks.size == 1:
            return False
        owners = [rank for rank, has in enumerate(self.ranks.gather(all(a.state for a in accumulators.values()))) if has]
        if not owners:
            return True
        shifts = {kind: (a.state["shift_x"].cpu(), a.state["shift_y"].cpu()) for kind, a in accumulators.items() if a.state}
        self._begin(accumulators, self.ranks.broadcast(shifts, owners[0]))
        return False

    def _set_shifts(self, accumulators: dict[str, MomentAccumulator], rows: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Shift by the means of the first chunk, which process 0 has: then everybody's products are those of a single process."""
        means = {kind: (x.float().mean(0).cpu(), y.float().mean(0).cpu()) for kind, (x, y) in rows.items()}
        self._begin(accumulators, self.ranks.broadcast(means))

    def _begin(self, accumulators: dict[str, MomentAccumulator], shifts: dict[str, tuple[Tensor, Tensor]]) -> None:
        for kind, (x, y) in shifts.items():
            if not accumulators[kind].state:
                accumulators[kind].begin(x.to(self.source.device), y.to(self.source.device))

    @torch.no_grad()
    def _features(self, batch: Any, kinds: Sequence[str], where: str) -> dict[str, tuple[Tensor, Tensor]]:
        tokens = batch.tolist()
        out: dict[str, list[Tensor]] = {kind: [] for kind in kinds}
        for model, layers in ((self.source, self.layers), (self.target, tuple(range(self.target.layers)))):
            kv = model.prefill(tokens)
            finite_or_raise(kv, model.name, where)
            # Stride before anything else: only the rows that count are unrotated.
            kv = RotatedKV([kv.keys[i] for i in layers], [kv.values[i] for i in layers], kv.lengths)
            for kind, features in _rows(kv, model, kinds, self.settings.stride).items():
                out[kind].append(features)
        return {kind: (pair[0], pair[1]) for kind, pair in out.items()}

    def _finish(self, overwrite: bool) -> None:
        with atomic_directory(self.out, overwrite=overwrite) as directory:
            for part in ("fit", "heldout"):
                for kind in self.kinds:
                    # Gigabytes that are on this disk already; they stay in the unfinished calibration until the whole is in its place.
                    _link(self._result_file(part, kind), directory / f"moments.{part}.{kind}.safetensors")
            save_tokens(self.blocks, directory)
            manifest = {**self.manifest, "created": utc_now(), "versions": versions()}
            (directory / "manifest.json").write_text(dump_json(manifest), encoding="utf-8")


def _advance(progress: Callable[[int, int], None] | None, before: int, total: int, done: int) -> None:
    """Tell the progress of one part as that of the whole."""
    if progress:
        progress(before + done, total)


def _link(file: Path, place: Path) -> None:
    """A second name for a file, or a copy where the file system has none."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)


def _rows(kv: RotatedKV, model: LoadedModel, kinds: Sequence[str], stride: int) -> dict[str, Tensor]:
    """`[rows, layers * kv_heads * head_dim]` float32 per kind, every stride-th token."""
    out = {}
    picked = RotatedKV([k[:, :, ::stride] for k in kv.keys], kv.values, kv.lengths)
    if "k" in kinds:
        positions = kv.positions()[:1, ::stride]
        cos, sin = model.rope.cos_sin(positions)
        out["k"] = _join([model.rope.strip(k.transpose(1, 2), cos, sin) for k in picked.keys])
    if "v" in kinds:
        out["v"] = _join([v[:, :, ::stride].transpose(1, 2) for v in kv.values])
    if "k_rotated" in kinds:
        out["k_rotated"] = _join([k.transpose(1, 2) for k in picked.keys])
    return out


def _join(layers: list[Tensor]) -> Tensor:
    home = layers[0].device
    return torch.cat([layer.float().reshape(layer.shape[0] * layer.shape[1], -1).to(home) for layer in layers], dim=1)


def _store(checkpoint: Path, accumulators: dict[str, MomentAccumulator], following: int) -> None:
    tensors = {f"{kind}.{name}": t.contiguous() for kind, acc in accumulators.items() for name, t in acc.snapshot().items()}
    tensors["next"] = torch.tensor(following)
    fresh, old = checkpoint.with_suffix(".new"), checkpoint.with_suffix(".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    save_file(tensors, str(fresh / "state.safetensors"))
    if checkpoint.exists():
        checkpoint.rename(old)
    fresh.rename(checkpoint)
    shutil.rmtree(old, ignore_errors=True)


def _restore(checkpoint: Path, accumulators: dict[str, MomentAccumulator]) -> int:
    old = checkpoint.with_suffix(".old")
    if not checkpoint.exists() and old.exists():
        old.rename(checkpoint)
    file = checkpoint / "state.safetensors"
    if not file.exists():
        return 0
    tensors = load_file(str(file))
    for kind, accumulator in accumulators.items():
        accumulator.restore({name.removeprefix(f"{kind}."): t for name, t in tensors.items() if name.startswith(f"{kind}.")})
    return int(tensors["next"])


def _save_result(path: Path, m: CrossMoments, prefix: str) -> None:
    tensors = {"mean_x": m.mean_x, "mean_y": m.mean_y, "xx": m.xx, "xy": m.xy, "yy": m.yy, "rows": torch.tensor(m.rows)}
    temporary = path.with_suffix(".tmp")
    save_file({prefix + name: t.contiguous() for name, t in tensors.items()}, str(temporary))
    temporary.replace(path)


def _difference(stored: Any, wanted: Any, where: str = "") -> str:
    """The first place where two manifests differ, in words."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        # What the user typed before what follows from it.
        for key in sorted(set(stored) | set(wanted), key=lambda k: (k != "settings", k)):
            if stored.get(key) != wanted.get(key):
                return _difference(stored.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    return f"{where or 'threads, device or machine'}: {stored} there, {wanted} now" if where else "threads, device or machine differ"
