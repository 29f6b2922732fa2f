"""Rough times of a screen's stages, before anything is loaded: token counts times parameters over a rate measured in a tenth of a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from kvbench.errors import KVBenchError
from kvbench.pairs.locate import load_config, resolve

if TYPE_CHECKING:
    from kvbench.screening.request import Request

# Share of the peak matrix rate that a forward pass of a real model reaches, as found on the SmolLM2 pair.
EFFICIENCY = 0.35
TOKENS_PER_ITEM = {"choice": 400, "generation": 1200}
ARMS = 5
EMBEDDED_ITEMS = ("tiny_choice", "tiny_fewshot", "tiny_sums", "tiny_prefix", "tiny_turns")


def estimate(request: Request, leaves: list[str], canary: str | None) -> dict[str, float]:
    """Seconds by stage; empty where the configurations cannot be read yet (the check will say why).

    Args:
        request: what is asked for.
        leaves: single tasks.
        canary: one of them, generated.
    """
    try:
        sizes = [_parameters(load_config(resolve(name), trust_remote_code=request.trust_remote_code)) for name in (request.source, request.target)]
    except KVBenchError:
        return {}
    rate = _rate(request.dtype) * EFFICIENCY
    both, target = sum(sizes), sizes[1]
    b = request.budget

    def seconds(tokens: float, parameters: float) -> float:
        return 2 * tokens * parameters / rate

    found = {"gates": 3.0, "timing": seconds(sum(request.lengths or request.policy.speed.lengths) * (b.repeats + b.warmups) * 2, both)}
    if request.mapper is None:
        found["calibrate"] = 1.5 * seconds((b.sequences + b.heldout) * b.seq_len, both)
    found["diagnose"] = seconds(b.heldout / 2 * b.seq_len * (2 + ARMS), target) + 64 * b.greedy_sequences * ARMS * 2 * target / rate * 20
    small = all(name.startswith("embedded:") for name in (request.source, request.target)) and set(leaves) == set(EMBEDDED_ITEMS)
    if small:
        # Known tasks of a few short items, where calls cost more than products.
        return {**found, "suite": 4.0, "canary": 1.0, "diagnose": 5.0, "timing": 4.0}
    items = b.limit or 1000
    rest = [name for name in leaves if name != canary]
    text = sum(name.endswith("prefix") for name in rest)
    choice = len(rest) - text
    found["suite"] = seconds(items * choice * TOKENS_PER_ITEM["choice"], both) + seconds(
        (b.text_limit or 150) * text * b.text_prefix, both + ARMS * target
    )
    if canary:
        count = b.canary_limit or 1000
        found["canary"] = seconds(count * TOKENS_PER_ITEM["generation"], both) + 10 * seconds(count * 128 * 3, target)
    return found


def _parameters(config: Any) -> float:
    text = config.get_text_config()
    width = int(text.hidden_size)
    head = getattr(text, "head_dim", None) or width // int(text.num_attention_heads)
    kv = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    attention = width * head * (2 * int(text.num_attention_heads) + 2 * kv)
    return float(text.num_hidden_layers * (attention + 3 * width * int(getattr(text, "intermediate_size", 4 * width))))


def _rate(dtype: str) -> float:
    """Operations per second of a matrix product on the CPU; a stand-in where another device does the work."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    a, b = torch.ones(512, 1024, dtype=kind), torch.ones(1024, 1024, dtype=kind)
    a @ b
    started = time.perf_counter()
    for _ in range(3):
        a @ b
    return 3 * 2 * 512 * 1024 * 1024 / max(1e-9, time.perf_counter() - started)
