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


def median_of_pairs(ours: Callable[[], Any], other: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Medians of both, measured in turns, so that a disturbance falls on both sides."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for work, kept in zip((ours, other), times, strict=True):
            started = time.perf_counter()
            work()
            if repeat:
                kept.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def processor() -> str:
    """Model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Bench:
    """The pair, loaded once."""

    def __init__(self, pair: Path, data: Path, dtype: str) -> None:
        from kvbench.pairs.models import load_model

        self.pair, self.data, self.dtype = pair, data, dtype
        self.source, self.target = (load_model(str(pair / role), dtype=dtype) for role in ("source", "target"))
        # Gigabytes of moments; they go when the process ends.
        self._folder = tempfile.TemporaryDirectory(prefix="kvbench-bench-")
        self.scratch = Path(self._folder.name)

    def blocks(self, sequences: int) -> Any:
        from kvbench.calibration.corpus import load_texts, pack

        text = load_texts(str(self.data / "calibration" / "openstax_biology.jsonl"))
        return pack(text, self.target.tokenizer, sequences=sequences, heldout=8, seq_len=512, seed=0)

    def moments(self, *, fresh: bool = False) -> Any:
        from kvbench.calibration.harvest import Harvest, HarvestSettings
        from kvbench.calibration.moments import Calibration

        out = self.scratch / ("moments-again" if fresh else "moments")
        if not out.exists():
            Harvest(self.source, self.target, self.blocks(32), {"name": "bench", "seed": 0}, HarvestSettings(stride=4), out).run()
        return Calibration(out)

    def mapper(self, recipe: Any = None) -> Path:
        from kvbench.mappers.artifact import save_mapper
        from kvbench.mappers.ridge import Ridge

        recipe = recipe or Ridge(k=8)
        out = self.scratch / recipe.method
        if not out.exists():
            calibration = self.moments()
            save_mapper(recipe.fit(calibration), out, recipe=recipe.configuration(), calibration=calibration.manifest)
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

    return median_of_pairs(lambda: harvest.run(overwrite=True), bare, 3)


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
    """Select and fit all layers against the plain way from the rows, as the seeds describe it.

    Plain: for every target layer, head, and one of K and V, X'X, X'Y and a float64 solve from the rows again: on each source layer
    alone (selection), then on the k chosen ones. Timed on every sixth target layer and multiplied; ours starts from moments, which
    calibration has accumulated while the models ran (row `calibration` pays for them).
    """
    from kvbench.calibration.harvest import Harvest, HarvestSettings
    from kvbench.mappers.ridge import Ridge

    calibration, blocks = bench.moments(), bench.blocks(32)
    harvest = Harvest(bench.source, bench.target, blocks, {"name": "bench", "seed": 0}, HarvestSettings(stride=4), bench.scratch / "rows")
    parts = [harvest._features(blocks.fit[i : i + 8], ("k", "v"), "bench") for i in range(0, len(blocks.fit), 8)]
    rows = {kind: tuple(torch.cat([part[kind][side] for part in parts]) for side in (0, 1)) for kind in ("k", "v")}
    rows = {kind: (x - x.mean(0), y - y.mean(0)) for kind, (x, y) in rows.items()}
    selected = Ridge(k=8).fit(calibration).source_layers
    width, dim = calibration.target_width, calibration.head_dim
    sampled = range(0, calibration.target_layers, 6)

    def solve(x: torch.Tensor, y: torch.Tensor) -> None:
        gram = (x.T @ x).double()
        gram.diagonal().add_(0.01)
        torch.linalg.solve(gram, (x.T @ y).double())

    def plain() -> None:
        for x, y in rows.values():
            for target in sampled:
                for head in range(calibration.kv_heads):
                    start = target * width + head * dim
                    answer = y[:, start : start + dim]
                    for source in calibration.source_layers:
                        solve(x[:, calibration.columns([source])], answer)
                    solve(x[:, calibration.columns(selected[target])], answer)

    ours = median_seconds(lambda: Ridge(k=8).fit(calibration), 3)
    return ours, median_seconds(plain, 1) * calibration.target_layers / len(sampled)


def second_k(bench: Bench) -> tuple[float, float]:
    """Another k and lambda against the first, from text to mapper; refuses any forward pass."""
    from kvbench.mappers.ridge import Ridge

    started = time.perf_counter()
    calibration = bench.moments(fresh=True)
    Ridge(k=8).fit(calibration)
    first = time.perf_counter() - started
    runs: list[int] = []
    hooks = [model.decoder.register_forward_pre_hook(lambda *_: runs.append(1)) for model in (bench.source, bench.target)]
    try:
        ours = median_seconds(lambda: Ridge(k=4, lambda_=0.1).fit(calibration), 3)
    finally:
        for hook in hooks:
            hook.remove()
    if runs:
        raise SystemExit(f"a second k ran a model {len(runs)} times")
    return ours, first


def fit_moments(bench: Bench) -> tuple[float, float]:
    """Select and fit against one solve per (source layer, target layer) and one per (target layer, head), both from moments."""
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


def _transfer(bench: Bench, directory: Path) -> tuple[Callable[[], Any], Any, Any]:
    """The transfer of 4 x 512 tokens with a stored mapper: how to run it, the arm, the source cache."""
    from kvbench.scoring.arms import mapper_arm
    from kvbench.scoring.engine import TransferEngine

    arm = mapper_arm(str(directory), bench.source, bench.target, name="m")
    engine = TransferEngine(bench.source, bench.target, [arm])
    rows = bench.blocks(4).fit[:4].tolist()
    kv = bench.source.prefill(rows)

    def ours() -> None:
        cache = bench.target.cache_for(len(rows), len(rows[0]), len(rows[0]))
        engine.map_into(cache, slice(0, len(rows)), 0, arm, bench.target, kv, bench.source)

    return ours, arm, kv


def apply(bench: Bench) -> tuple[float, float]:
    """Strip, map, rotate and inject 2,048 tokens against the mapper's matrix products alone."""
    ours, arm, kv = _transfer(bench, bench.mapper())
    tokens, width, dtype = kv.tokens * kv.keys[0].shape[0], bench.target.kv_heads * bench.target.head_dim, bench.target.dtype
    designs = [torch.randn(tokens, len(chosen) * width).to(dtype) for chosen in arm.mapper.source_layers]
    weights = [torch.randn(len(chosen) * width, width).to(dtype) for chosen in arm.mapper.source_layers]

    def products() -> None:
        for design, weight in zip(designs, weights, strict=True):
            for _ in range(2):
                design @ weight

    return median_of_pairs(ours, products, 9)


def apply_head_local(bench: Bench) -> tuple[float, float]:
    """The same for the head-local mapper, whose products are batched over heads."""
    from kvbench.mappers.head_local import HeadLocal

    ours, arm, kv = _transfer(bench, bench.mapper(HeadLocal(k=8)))
    tokens, heads, dim, dtype = kv.tokens * kv.keys[0].shape[0], bench.target.kv_heads, bench.target.head_dim, bench.target.dtype
    designs = [torch.randn(heads, tokens, len(chosen) * dim).to(dtype) for chosen in arm.mapper.source_layers]
    weights = [torch.randn(heads, len(chosen) * dim, dim).to(dtype) for chosen in arm.mapper.source_layers]

    def products() -> None:
        for design, weight in zip(designs, weights, strict=True):
            for _ in range(2):
                torch.bmm(design, weight)

    return median_of_pairs(ours, products, 9)


def memory(bench: Bench) -> tuple[float, float]:
    """Peak bytes of applying ridge to 2,048 tokens, weights read layer by layer, against both caches and ONE layer's weights."""
    from kvbench.mappers import linear
    from kvbench.timing.memory import PeakMemory

    kept = linear.RESIDENT_BYTES
    linear.RESIDENT_BYTES = 0
    try:
        ours, arm, kv = _transfer(bench, bench.mapper())
        ours()
        with PeakMemory() as meter:
            ours()
    finally:
        linear.RESIDENT_BYTES = kept
    size = bench.target.dtype.itemsize
    source = sum(t.numel() for t in (*kv.keys, *kv.values)) * size
    tokens, width = kv.tokens * kv.keys[0].shape[0], bench.target.kv_heads * bench.target.head_dim
    target = 2 * bench.target.layers * tokens * width * size
    layer = 2 * max(map(len, arm.mapper.source_layers)) * arm.mapper.source_width * width * size
    return float(source + meter.peak_bytes), float(source + target + layer)


ROWS: dict[str, tuple[Callable[[Bench], tuple[float, float]], str]] = {
    "calibration": (calibration, "at most 1.5x"),
    "choice": (choice, "at most 1.0x, goal 0.6x"),
    "fewshot": (fewshot, "at most 0.33x, goal 0.2x"),
    "fit": (fit, "at most 0.1x"),
    "fit_moments": (fit_moments, "for information"),
    "second_k": (second_k, "no forward pass; seconds"),
    "apply": (apply, "at most 1.5x"),
    "apply_head_local": (apply_head_local, "for information"),
    "memory": (memory, "at most 1.1x"),
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
    parser.add_argument("--profile", action="store_true", help="print where the rows of --only spend their time instead of ratios")
    parser.add_argument("--baseline", type=Path, help="results of an earlier run; says where this one is worse")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.pair, arguments.data, arguments.dtype)
    machine = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
    }
    print(f"machine: {machine}")
    earlier = json.loads(arguments.baseline.read_text()) if arguments.baseline else {"rows": {}}
    if arguments.baseline and earlier["machine"] != machine:
        print(f"the baseline was measured elsewhere: {earlier['machine']}")
    rows = {}
    worse = []
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row '{unknown[0]}'; the rows are {', '.join(ROWS)}")
    for name in names:
        work, wanted = ROWS[name]
        if arguments.profile:
            profiled(name, lambda work=work: work(bench))
            continue
        ours, other = work(bench)
        ratio = ours / other
        unit, scale = ("MB", 1e-6) if name == "memory" else ("s", 1.0)
        rows[name] = {"ours": ours, "other": other, "ratio": ratio, "unit": "bytes" if unit == "MB" else "seconds", "wanted": wanted}
        before = earlier["rows"].get(name, {}).get("ratio")
        note = ""
        if before:
            note = f"; baseline {before:.2f}x"
            if ratio > 1.1 * before:
                note += " WORSE"
                worse.append(name)
        print(f"{name:<17} {ratio:6.3f}x  ours {ours * scale:9.3f} {unit}, other {other * scale:9.3f} {unit}  (wanted: {wanted}{note})", flush=True)
    if arguments.baseline and not arguments.profile:
        print(f"worse than the baseline by more than a tenth: {', '.join(worse) or 'nothing'}")
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, allow_nan=False, indent=2, sort_keys=True) + "\n")


def profiled(name: str, work: Callable[[], Any]) -> None:
    """Where one row spends its time, both sides together: Python functions by own time (torch operators appear as built-in methods)."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(work)
    print(f"== {name}")
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
