"""Peak memory of every stage of the way, measured on this pair beside what the plan says."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.harvest import Harvest, HarvestSettings
from kvbench.calibration.moments import Calibration
from kvbench.mappers.base import Mapper, Recipe
from kvbench.mappers.linear import SelectedMapper
from kvbench.pairs.geometry import geometry_of
from kvbench.pairs.models import LoadedModel
from kvbench.runs.latency import StagePeak
from kvbench.scoring.arms import Arm, own_prefill
from kvbench.scoring.engine import TransferEngine
from kvbench.timing.clock import release
from kvbench.timing.counted import size_of
from kvbench.timing.memory import PeakMemory
from kvbench.timing.plan import activation_bytes, block_bytes, content_bytes

SEQUENCES, SEQ_LEN, ROWS = 32, 128, 4


def stage_peaks(
    source: LoadedModel, target: LoadedModel, mappers: Mapping[str, Mapper], recipe: Recipe, *, tokens: int, seed: int = 0
) -> tuple[StagePeak, ...]:
    """Calibrate and fit on a few random sequences, then apply and evaluate at one context length.

    Moments and fit need as much memory for few rows as for many. All peaks are beyond what was in use when the stage began.

    Args:
        source: the model that prefills.
        target: the model that answers.
        mappers: by name; each is applied, all are evaluated together.
        recipe: a closed form that is fitted.
        tokens: context length of apply and evaluate.
        seed: of the random tokens.
    """
    device = target.device
    draw = np.random.default_rng(seed)
    vocabulary = min(int(m.config.vocab_size) for m in (source, target))

    def ids(rows: int, length: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return draw.integers(0, vocabulary, (rows, length)).astype(np.int32)

    found: list[StagePeak] = []

    def note(stage: str, meter: PeakMemory, planned: int | None, what: str) -> None:
        found.append(StagePeak(stage=stage, peak_bytes=meter.peak_bytes, planned_bytes=planned, method=meter.method, what=what))
        release(device)

    with tempfile.TemporaryDirectory(prefix="kvbench-stages-") as folder:
        blocks = TokenBlocks(ids(SEQUENCES, SEQ_LEN), ids(4, SEQ_LEN), SEQUENCES, 4)
        harvest = Harvest(
            source, target, blocks, {"name": "random ids", "seed": seed}, HarvestSettings(stride=1, batch_size=4), Path(folder) / "moments"
        )
        plan = harvest.memory_plan()
        with PeakMemory(device) as meter:
            out = harvest.run()
        note("calibrate", meter, plan.moments + plan.rows, f"{SEQUENCES} sequences of {SEQ_LEN} random tokens, every token")
        calibration = Calibration(out)
        with PeakMemory(device) as meter:
            recipe.fit(calibration)
        note("fit", meter, None, repr(recipe))
    rows = ids(ROWS, tokens).tolist()
    sizes = size_of(source), size_of(target)
    shapes = geometry_of(source.config), geometry_of(target.config)
    for name, mapper in mappers.items():
        arm = Arm(name, "target", mapper)
        engine = TransferEngine(source, target, [arm])
        with torch.no_grad():
            kv = source.prefill(rows[:1])
            with PeakMemory(device) as meter:
                cache = target.cache_for(1, tokens, tokens)
                engine.map_into(cache, slice(0, 1), 0, arm, target, kv, source)
        layer = mapper.parameters() // target.layers * sizes[1].element_bytes
        most = max((len(layers) for layers in mapper.source_layers), default=0) if isinstance(mapper, SelectedMapper) else 0
        block = block_bytes(*shapes, most * source.kv_heads * source.head_dim, tokens, sizes[1].element_bytes)
        note(f"apply, {name}", meter, tokens * sizes[1].cache_bytes_per_token + layer + block, f"{tokens:,} tokens, the source cache being there")
        del cache, kv
    arms = [own_prefill("target", target), own_prefill("source", source), *(Arm(name, "target", mapper) for name, mapper in mappers.items())]
    engine = TransferEngine(source, target, arms)
    with PeakMemory(device) as meter:
        stacks = engine.fill((), [tuple(row) for row in rows], [()] * ROWS, room=16)
    caches = ROWS * tokens * ((2 + len(mappers)) * sizes[1].cache_bytes_per_token + 2 * sizes[0].cache_bytes_per_token)
    element = sizes[1].element_bytes
    more = content_bytes(shapes[0], ROWS * tokens, element) + activation_bytes(shapes, ROWS * tokens, element)
    note("evaluate", meter, caches + more, f"{ROWS} contexts of {tokens:,} tokens, {len(arms)} arms")
    del stacks
    return tuple(found)
