"""What a screen is asked for, how it talks, and what it will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.scoring.scorer import Bar
from kvbench.scoring.taskfiles import Leaf
from kvbench.screening.budget import Budget
from kvbench.screening.policy import ScreenPolicy


@dataclass(frozen=True)
class Request:
    """What is asked for; all of it decides the outcome, so a screen resumes only if none of it changed.

    Attributes:
        source: the model that prefills.
        target: the model that answers.
        data: calibration text, or a folder with `calibration` and task rows.
        policy: thresholds.
        budget: sizes.
        tasks: lm-eval tasks.
        data_dir: local rows for stock tasks.
        include: more task folders.
        mapper: a fitted artifact (or a control) to screen instead of fitting candidates.
        lengths: context lengths of the timing.
        hold_back: last context tokens that the target runs itself.
        seed: of calibration order and few-shot sampling.
        dtype: of both models.
        device: of both models.
        device_map: accelerate's.
        attention: backend.
        source_revision: hub revision.
        target_revision: hub revision.
        trust_remote_code: run code of the repositories.
        allow_mismatched: take unequal KV heads or widths (experimental).
    """

    source: str
    target: str
    data: str
    policy: ScreenPolicy
    budget: Budget
    tasks: tuple[str, ...]
    data_dir: Path | None
    include: tuple[Path, ...] = ()
    mapper: str | None = None
    lengths: tuple[int, ...] = ()
    hold_back: int = 1
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    device_map: str | None = None
    attention: str = "sdpa"
    source_revision: str | None = None
    target_revision: str | None = None
    trust_remote_code: bool = False
    allow_mismatched: bool = False

    def spec(self) -> dict[str, Any]:
        """As JSON values."""
        named = {k: getattr(self, k) for k in self.__dataclass_fields__ if k not in ("policy", "budget", "data_dir", "include")}
        return {
            **named,
            "tasks": list(self.tasks),
            "lengths": list(self.lengths),
            "data_dir": str(self.data_dir) if self.data_dir else None,
            "include": [str(path) for path in self.include],
            "policy": self.policy.fingerprint(),
            "budget": {k: str(v) for k, v in vars(self.budget).items()},
        }


@dataclass(frozen=True)
class Talk:
    """How a screen tells what it does.

    Attributes:
        say: a line.
        step: makes a progress bar from description and unit: called with done and total.
        scoring: bars of the scorer.
    """

    say: Callable[[str], None]
    step: Callable[[str, str], Callable[[int, int], None]]
    scoring: Bar


def scores_text(leaf: Leaf) -> bool:
    """Whether a task scores text instead of answers."""
    metrics = leaf.config.get("metric_list") or ()
    names = [str(m.get("metric")) if isinstance(m, dict) else str(m) for m in metrics]
    return any("perplexity" in name or "nll" in name for name in names)


def plan_lines(request: Request, leaves: list[str], canary: str | None, seconds: dict[str, float]) -> list[str]:
    """What a screen will do, one line per stage, with estimates where there are any.

    Args:
        request: what is asked for.
        leaves: single tasks.
        canary: one of them.
        seconds: estimated, by stage.
    """
    b = request.budget
    rest = [name for name in leaves if name != canary]
    items = "all items" if b.limit is None else f"{b.limit} items"
    lines = {
        "check": "configurations and tokenizers, no weights",
        "gates": "load both models; injection, RoPE, zero cache",
        "calibrate": f"{b.sequences} + {b.heldout} sequences of up to {b.seq_len} tokens, stride {b.stride}"
        if request.mapper is None
        else "not needed",
        "fit": ", ".join(f"{m} k={k or 'all'}" for m, k in b.candidates) if request.mapper is None else f"{request.mapper} as given",
        "diagnose": f"{b.heldout // 2} held-out sequences; warns, does not decide",
        "canary": f"{canary}, {'all' if b.canary_limit is None else b.canary_limit} items" if canary else "none",
        "suite": f"{', '.join(rest) or 'nothing else'}; {items} each; target, source, mapper, two controls",
        "timing": f"{b.repeats} repeats at {', '.join(map(str, request.lengths or request.policy.speed.lengths))} tokens, warm and cold",
    }
    return [f"  {name:<9} {f'~{seconds[name]:.0f} s' if name in seconds else '':>7}  {what}" for name, what in lines.items()]
