"""Speed of kvbench as ratios within one process run. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch


def median_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median wall time of `work`, after one warm-up where there are several repeats."""
    if repeats > 1:
        work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class Bench:
    """The pair, loaded once."""

    def __init__(self, pair: Path, data: Path, dtype: str) -> None:
        from kvbench.pairs.models import load_model

        self.pair, self.data, self.dtype = pair, data, dtype
        self.source, self.target = (load_model(str(pair / role), dtype=dtype) for role in ("source", "target"))
        self.scratch = Path(tempfile.mkdtemp(prefix="kvbench-bench-"))

    def blocks(self, sequences: int) -> Any:
        from kvbench.calibration.corpus import load_texts, pack

        text = load_texts(str(self.data / "calibration" / "openstax_biology.jsonl"))
        return pack(text, self.target.tokenizer, sequences=sequences, heldout=8, seq_len=512, seed=0)

    def moments(self) -> Any:
        from kvbench.calibration.harvest import Harvest, HarvestSettings
        from kvbench.calibration.moments import Calibration

        out = self.scratch / "moments"
        if not out.exists():
            Harvest(self.source, self.target, self.blocks(32), {"name": "bench", "seed": 0}, HarvestSettings(stride=4), out).run()
        return Calibration(out)

    def mapper(self) -> Path:
        from kvbench.mappers.artifact import save_mapper
        from kvbench.mappers.ridge import Ridge

        out = self.scratch / "ridge"
        if not out.exists():
            calibration = self.moments()
            save_mapper(Ridge(k=8).fit(calibration), out, recipe=Ridge(k=8).configuration(), calibration=calibration.manifest)
        return out


def calibration(bench: Bench) -> tuple[float, float]:
    """Calibration at stride 4 against both bare forward passes."""
    from kvbench.calibration.harvest import Harvest, HarvestSettings

    blocks = bench.blocks(32)
    harvest = Harvest(
        bench.source, bench.target, blocks, {"name": "bench", "seed": 0}, HarvestSettings(stride=4, batch_size=8), bench.scratch / "calibration"
    )

    def bare() -> None:
        for model in (bench.source, bench.target):
            for part in (blocks.fit, blocks.heldout):
                for first in range(0, len(part), 8):
                    model.prefill(part[first : first + 8].tolist())

    return median_seconds(lambda: harvest.run(overwrite=True), 3), median_seconds(bare, 3)


def _scoring(bench: Bench, tasks: list[str], limit: int, batch_size: int, num_fewshot: int | None = None) -> tuple[float, float]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from kvbench.scoring.arms import mapper_arm, own_prefill
    from kvbench.scoring.engine import TransferEngine
    from kvbench.scoring.evaluate import evaluate_arms
    from kvbench.scoring.offline import overlays
    from kvbench.scoring.scorer import SharedScorer

    folder = bench.scratch / "tasks"
    overlays(tasks, bench.data, folder, num_fewshot=num_fewshot)
    manager = TaskManager(include_path=[str(folder)], include_defaults=False, metadata={"pretrained": bench.target.ref.path})
    arms = [own_prefill("target", bench.target), own_prefill("source", bench.source)]
    arms += [mapper_arm(str(bench.mapper()), bench.source, bench.target, name="ridge"), mapper_arm("zero", bench.source, bench.target)]

    def ours() -> None:
        scorer = SharedScorer(TransferEngine(bench.source, bench.target, arms), batch_size=batch_size, max_length=8192)
        evaluate_arms(scorer, tasks, manager=manager, limit=limit, num_fewshot=num_fewshot)

    def plain() -> None:
        for model in (bench.target, bench.source):
            lm = HFLM(pretrained=model.model, tokenizer=model.tokenizer, batch_size=batch_size)
            lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, limit=limit, num_fewshot=num_fewshot, bootstrap_iters=0)

    return median_seconds(ours, 1), median_seconds(plain, 1)


def choice(bench: Bench) -> tuple[float, float]:
    """Four arms on ARC-Easy against two plain lm-eval runs."""
    return _scoring(bench, ["arc_easy"], 150, 16)


def fewshot(bench: Bench) -> tuple[float, float]:
    """Four arms on 5-shot MMLU against two plain lm-eval runs."""
    return _scoring(bench, ["mmlu_astronomy"], 40, 16, num_fewshot=5)


def fit(bench: Bench) -> tuple[float, float]:
    """Select and fit all layers against one solve per (source layer, target layer) and one per target layer."""
    from kvbench.mappers.ridge import Ridge

    calibration = bench.moments()
    selected = Ridge(k=8).fit(calibration).source_layers
    width = calibration.target_width

    def plain() -> None:
        for kind in ("k", "v"):
            m = calibration.moments("fit", kind)
            eye = 0.01 * torch.eye(calibration.source_width, dtype=torch.float64)
            for source in calibration.source_layers:
                rows = calibration.columns([source])
                for target in range(calibration.target_layers):
                    torch.linalg.solve(m.xx[rows][:, rows] + eye, m.xy[rows, target * width : (target + 1) * width])
            for target, layers in enumerate(selected):
                rows = calibration.columns(layers)
                ridge = 0.01 * torch.eye(len(rows), dtype=torch.float64)
                for head in range(calibration.kv_heads):
                    start = target * width + head * calibration.head_dim
                    torch.linalg.solve(m.xx[rows][:, rows] + ridge, m.xy[rows, start : start + calibration.head_dim])

    return median_seconds(lambda: Ridge(k=8).fit(calibration), 3), median_seconds(plain, 1)


def apply(bench: Bench) -> tuple[float, float]:
    """Strip, map, rotate and inject 2,048 tokens against the mapper's matrix products alone."""
    from kvbench.scoring.arms import mapper_arm
    from kvbench.scoring.engine import TransferEngine

    arm = mapper_arm(str(bench.mapper()), bench.source, bench.target, name="ridge")
    engine = TransferEngine(bench.source, bench.target, [arm])
    rows = bench.blocks(4).fit[:4].tolist()
    kv = bench.source.prefill(rows)
    layers = arm.mapper.source_layers  # type: ignore[attr-defined]
    tokens, width, dtype = len(rows) * len(rows[0]), bench.target.kv_heads * bench.target.head_dim, bench.target.dtype
    designs = [torch.randn(tokens, len(chosen) * width).to(dtype) for chosen in layers]
    weights = [torch.randn(len(chosen) * width, width).to(dtype) for chosen in layers]

    def products() -> None:
        for design, weight in zip(designs, weights, strict=True):
            for _ in range(2):
                design @ weight

    def ours() -> None:
        cache = bench.target.cache_for(len(rows), len(rows[0]), len(rows[0]))
        engine.map_into(cache, slice(0, len(rows)), 0, arm, bench.target, kv, bench.source)

    return median_seconds(ours, 5), median_seconds(products, 5)


ROWS: dict[str, tuple[Callable[[Bench], tuple[float, float]], str]] = {
    "calibration": (calibration, "at most 1.5x"),
    "choice": (choice, "at most 1.0x, goal 0.6x"),
    "fewshot": (fewshot, "at most 0.33x, goal 0.2x"),
    "fit": (fit, "at most 0.1x"),
    "apply": (apply, "at most 1.5x"),
}


def main() -> None:
    """Run the rows and print ratio and both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--baseline", type=Path, help="results of an earlier run; says where this one is worse")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.pair, arguments.data, arguments.dtype)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
    }
    print(f"machine: {machine}")
    earlier = json.loads(arguments.baseline.read_text()) if arguments.baseline else {"rows": {}}
    rows = {}
    for name in arguments.only.split(","):
        work, wanted = ROWS[name]
        ours, other = work(bench)
        rows[name] = {"ours_seconds": ours, "other_seconds": other, "ratio": ours / other}
        before = earlier["rows"].get(name, {}).get("ratio")
        note = f"; baseline {before:.2f}x{' WORSE' if ours / other > 1.1 * before else ''}" if before else ""
        print(f"{name:<12} {ours / other:6.2f}x  ours {ours:8.2f} s, other {other:8.2f} s  (wanted: {wanted}{note})", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
