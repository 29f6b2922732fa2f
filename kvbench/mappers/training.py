"""What trained mappers share: progress on stderr, checkpoints that resume bit for bit, rows on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.calibration.moments import Calibration
from kvbench.calibration.sequences import batches, load_tokens, pair_of, run_pair
from kvbench.errors import BadInputError
from kvbench.kv.content import ContentKV, Kind
from kvbench.mappers.base import Progress
from kvbench.pairs.models import LoadedModel
from kvbench.storage import dump_json, write_atomic

KINDS: tuple[Kind, Kind] = ("k", "v")


def report_to_stderr(what: str, done: int, total: int) -> None:
    """A `Progress` for terminals and logs: one line, rewritten in place on a terminal, every tenth otherwise."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{what} {done}/{total}" + ("\n" if done >= total else ""))
    elif done >= total or done % max(1, total // 10) == 0:
        sys.stderr.write(f"{what} {done}/{total}\n")
    sys.stderr.flush()


def identity_of(configuration: Mapping[str, Any], calibration: Calibration) -> str:
    """What must be equal for a checkpoint to be gone on from: recipe, calibration, threads."""
    facts = {
        "recipe": dict(configuration),
        "data": calibration.manifest["data"],
        "source": calibration.manifest["source"],
        "target": calibration.manifest["target"],
        "threads": torch.get_num_threads(),
    }
    return hashlib.sha256(dump_json(facts).encode()).hexdigest()


@contextmanager
def workplace(checkpoint: Path | None, identity: str) -> Iterator[Path]:
    """The directory where a fit keeps its state: the checkpoint, or a temporary one that is gone afterwards.

    Raises:
        BadInputError: the checkpoint belongs to another fit, or cannot be written.
    """
    if checkpoint is None:
        folder = Path(tempfile.mkdtemp(prefix="kvbench-fit-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        checkpoint.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"cannot write to '{checkpoint}': {error.strerror or error}") from error
    mark = checkpoint / "identity"
    if mark.exists() and mark.read_text() != identity:
        raise BadInputError(
            f"'{checkpoint}' holds a fit with another recipe, calibration or number of threads; delete it or choose another directory"
        )
    write_atomic(mark, identity)
    yield checkpoint


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors, numbers and lists so that a crash leaves the old or the new file, never half of one."""
    temporary = path.with_suffix(".tmp")
    torch.save(dict(state), temporary)
    os.replace(temporary, path)


def load_state(path: Path) -> dict[str, Any] | None:
    """What `save_state` wrote, or None."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


class RowStore:
    """Strided rows of both models on disk, one file per part, side, kind and layer, float32, read back as memory maps.

    Args:
        folder: where the files are.
        source_width: features of a source layer.
        target_width: features of a target layer.
    """

    def __init__(self, folder: Path, source_width: int, target_width: int) -> None:
        self.folder = folder
        self._widths = {"source": source_width, "target": target_width}

    def read(self, part: str, side: str, kind: str, layer: int) -> Tensor:
        """`[rows, width]`."""
        mapped = np.memmap(self._file(part, side, kind, layer), dtype=np.float32, mode="c").reshape(-1, self._widths[side])
        return torch.from_numpy(mapped)

    def design(self, part: str, kind: str, layers: Sequence[int]) -> Tensor:
        """Source layers side by side, `[rows, k * width]`."""
        return torch.cat([self.read(part, "source", kind, layer) for layer in layers], dim=1)

    def _file(self, part: str, side: str, kind: str, layer: int) -> Path:
        return self.folder / f"{part}.{side}.{kind}.{layer}.f32"

    def gather(
        self,
        calibration: Calibration,
        models: tuple[LoadedModel, LoadedModel] | None,
        source_layers: Sequence[int],
        *,
        batch_size: int,
        strip: bool,
        progress: Progress | None,
    ) -> None:
        """Run the stored sequences through both models once, unless an earlier fit with this folder did."""
        done = self.folder / "rows.complete"
        if done.exists():
            return
        blocks = load_tokens(calibration)
        source, target = pair_of(calibration, models)
        stride = int(calibration.manifest["data"]["stride"])
        total = len(blocks.fit) + len(blocks.heldout)
        for part, rows, before in (("fit", blocks.fit, 0), ("heldout", blocks.heldout, len(blocks.fit))):
            for old in self.folder.glob(f"{part}.*.f32"):
                old.unlink()
            for first, some in batches(rows, batch_size):
                batch = run_pair(source, target, some, queries=False, strip=strip, where=f"batch at {part} sequence {first}")
                for kind in KINDS:
                    self._append(part, "source", kind, batch.source, source_layers, stride)
                    self._append(part, "target", kind, batch.target, range(target.layers), stride)
                if progress:
                    progress("running the sequences", before + min(first + batch_size, len(rows)), total)
        done.touch()

    def _append(self, part: str, side: str, kind: Kind, content: ContentKV, layers: Sequence[int], stride: int) -> None:
        for layer in layers:
            rows = content.layer(layer, kind)[:, ::stride].float().cpu()
            with self._file(part, side, kind, layer).open("ab") as file:
                file.write(rows.reshape(-1, self._widths[side]).contiguous().numpy().tobytes())
