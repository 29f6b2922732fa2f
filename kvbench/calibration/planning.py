"""What a calibration will hold in memory, said before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import BadInputError


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        moments: both parts and all kinds that are held at the same time.
        disk: the finished moments file plus one checkpoint.
        rows: float32 rows gathered between two products.
        models: weights of both models.
        available: memory free on this machine.
    """

    moments: int
    disk: int
    rows: int
    models: int
    available: int

    @property
    def total(self) -> int:
        """Everything at once."""
        return self.moments + self.rows + self.models

    def describe(self) -> str:
        """One line for people."""
        gb = 1 / 1e9
        return (
            f"memory plan: moments {self.moments * gb:.2f} GB + rows {self.rows * gb:.2f} GB + models {self.models * gb:.2f} GB = {self.total * gb:.2f} GB "
            f"of {self.available * gb:.1f} GB available; on disk up to {self.disk * gb:.2f} GB"
        )

    def refuse_if_too_large(self) -> None:
        """Refuse before allocating.

        Raises:
            BadInputError: with the remedies.
        """
        # The models are in memory already when the plan is made, so only the rest must still fit.
        needed = self.moments + self.rows
        if needed > self.available:
            raise BadInputError(
                f"calibration needs {needed / 1e9:.1f} GB for moments, but {self.available / 1e9:.1f} GB are available; use fewer candidate layers (--every-layer 2 or --source-layers 0,4,...), "
                "keys and values in separate passes (--separate-passes), or a machine with more memory"
            )


def available_bytes() -> int:
    """Memory that can be allocated now, from the operating system's own estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    import os

    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def plan(*, px: int, py: int, kinds: int, at_once: int, chunk_rows: int, models: int) -> MemoryPlan:
    """Sizes of a calibration.

    Args:
        px: source features (candidate layers x KV heads x head width).
        py: target features.
        kinds: kinds stored (2, or 3 with rotated keys).
        at_once: kinds held at the same time.
        chunk_rows: rows gathered between two products.
        models: bytes of both models' weights.
    """
    one = 8 * (px * px + px * py + 2 * (px + py) + py)
    product = 4 * (px * px + px * py)
    return MemoryPlan(
        moments=2 * at_once * one + product,
        disk=4 * kinds * one,
        rows=at_once * 4 * chunk_rows * (px + py) * 3,
        models=models,
        available=available_bytes(),
    )
