"""Gates: does the transfer path work for these loaded models at all? Run before anything expensive, per pair.

A failing gate means that every later figure would be about a broken path instead of about the mapper. The probe is text that
the model itself samples (seeded), so that the gates need no data and the text is natural for any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvbench.errors import GateError
from kvbench.kv.capture import pre_rotation_keys, to_content
from kvbench.kv.content import RotatedKV
from kvbench.pairs.models import LoadedModel, Query, write_prefix

# Nats per token: the largest difference in float32; in half precision the root mean square, since there the rounding of one
# unlikely token's logit alone can exceed the bound. Half-precision models may also differ that much from themselves: the bound
# is at least `NOISE_FACTOR` times what the model's own cached continuation (no code of ours) differs from its one forward pass.
TOLERANCE_NATS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
NOISE_FACTOR = 1.5
# Relative error of stripped keys against the model's own pre-rotation keys (rounding of the cache dtype).
TOLERANCE_STRIP = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
# A zeroed cache must cost at least this much on average, nats per token.
ZERO_GAP_NATS = 0.05
PROBE_ROWS, PROBE_PREFIX, PROBE_SUFFIX = 4, 48, 48


@dataclass(frozen=True)
class GateResult:
    """One gate on one model.

    Attributes:
        gate: `injection`, `rope_strip`, `oracle` or `zero`.
        model: name of the model.
        figure: what was measured.
        bound: what it is compared with.
        unit: of both.
        passed: the outcome.
        cause: likely cause of a failure.
    """

    gate: str
    model: str
    figure: float
    bound: float
    unit: str
    passed: bool
    cause: str


@dataclass(frozen=True)
class GateReport:
    """All gates of a pair."""

    results: tuple[GateResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
        return all(result.passed for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, "gates": [asdict(result) for result in self.results]}

    def raise_if_failed(self) -> None:
        """Stop here.

        Raises:
            GateError: names model, gate, figure, bound and the likely cause of the first failure.
        """
        for r in self.results:
            if not r.passed:
                relation = "at least" if r.gate == "zero" else "at most"
                raise GateError(
                    f"gate '{r.gate}' failed for '{r.model}': {r.figure:.4g} {r.unit}, but {relation} {r.bound:.4g} is needed. Likely cause: {r.cause}"
                )


def run_gates(source: LoadedModel | None, target: LoadedModel | None, *, seed: int = 0) -> GateReport:
    """Run the gates on the models at hand: injection and RoPE strip on both, oracle and zero on the target."""
    results: list[GateResult] = []
    for model in dict.fromkeys(m for m in (source, target) if m is not None):
        rows = _probe(model, seed)
        results += [_injection(model, rows, "injection"), _strip(model, rows)]
    if target is not None:
        rows = _probe(target, seed)
        results += [_injection(target, rows, "oracle"), _zero(target, rows)]
    return GateReport(tuple(results))


@torch.no_grad()
def _probe(model: LoadedModel, seed: int) -> Tensor:
    """`[rows, tokens]` sampled from the model itself, each row from its own random first token."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(len(model.tokenizer), int(model.model.get_input_embeddings().weight.shape[0]))
    length = PROBE_PREFIX + PROBE_SUFFIX
    ids = torch.randint(vocabulary, (PROBE_ROWS, 1), generator=generator)
    cache = model.cache_for(PROBE_ROWS, length, 0)
    none = torch.zeros(PROBE_ROWS, dtype=torch.long, device=model.device)
    behind = torch.zeros(PROBE_ROWS, 0, dtype=torch.long, device=model.device)
    while ids.shape[1] < length:
        at = ids.shape[1] - 1
        step = ids[:, -1:].to(model.device)
        positions = torch.full_like(step, at)
        hidden = model.run(cache, Query(step, positions, torch.zeros_like(step)), 0, none, 0, behind)
        behind = torch.cat([behind, positions], dim=1)
        probabilities = model.logits(hidden[:, -1]).softmax(-1).cpu()
        if not bool(torch.isfinite(probabilities).all()):
            raise GateError(
                f"'{model.name}' produces non-finite logits on its own text; the weights or the dtype ({model.dtype}) are broken, try float32"
            )
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return ids


def _token_logprobs(model: LoadedModel, hidden: Tensor, wanted: Tensor) -> Tensor:
    rows = [model.logits(h).log_softmax(-1).gather(1, w[:, None].to(h.device)).squeeze(1) for h, w in zip(hidden, wanted, strict=True)]
    stacked: Tensor = torch.stack(rows).cpu()
    return stacked


@torch.no_grad()
def _standalone(model: LoadedModel, rows: Tensor) -> Tensor:
    """Log-probabilities of the suffix tokens from one plain forward pass, the model's own way."""
    logits = model.model(input_ids=rows.to(model.device), use_cache=False).logits[:, PROBE_PREFIX - 1 : -1].float()
    picked: Tensor = logits.log_softmax(-1).gather(2, rows[:, PROBE_PREFIX:, None].to(logits.device)).squeeze(2).cpu()
    return picked


@torch.no_grad()
def _native_continuation(model: LoadedModel, rows: Tensor) -> Tensor:
    """The same from transformers' own cache and masks: what splitting a sequence costs in rounding alone."""
    cache, ids = DynamicCache(), rows.to(model.device)
    model.decoder(input_ids=ids[:, : PROBE_PREFIX - 1], cache=cache, use_cache=True)
    logits = model.model(input_ids=ids[:, PROBE_PREFIX - 1 : -1], cache=cache, use_cache=True).logits.float()
    picked: Tensor = logits.log_softmax(-1).gather(2, ids[:, PROBE_PREFIX:, None].to(logits.device)).squeeze(2).cpu()
    return picked


@torch.no_grad()
def _behind(model: LoadedModel, rows: Tensor, kv: RotatedKV) -> Tensor:
    """The same behind a given cache of the first `PROBE_PREFIX - 1` tokens (one is held back)."""
    cached = PROBE_PREFIX - 1
    cache = model.cache_for(len(rows), rows.shape[1], cached)
    write_prefix(cache, kv, slice(None), 0)
    ids = rows[:, cached:-1].to(model.device)
    positions = (torch.arange(ids.shape[1], device=model.device) + cached).expand(len(rows), -1)
    lengths = torch.full((len(rows),), cached, device=model.device)
    hidden = model.run(cache, Query(ids, positions, torch.zeros_like(ids)), 0, lengths, cached)
    return _token_logprobs(model, hidden, rows[:, PROBE_PREFIX:])


@torch.no_grad()
def _through_content(model: LoadedModel, rows: Tensor) -> RotatedKV:
    """The model's own cache, to content space and back, in the cache dtype."""
    kv = model.prefill(rows[:, : PROBE_PREFIX - 1].tolist())
    content = to_content(kv, model.rope)
    cos, sin = model.rope.cos_sin(content.positions[:1])
    keys = [model.rope.apply(k, cos, sin).to(model.dtype).transpose(1, 2) for k in content.keys]
    return RotatedKV(keys, [v.transpose(1, 2) for v in content.values], kv.lengths)


def _injection(model: LoadedModel, rows: Tensor, gate: str) -> GateResult:
    reference = _standalone(model, rows)
    differences = _behind(model, rows, _through_content(model, rows)) - reference
    exact = model.dtype in (torch.float32, torch.float64)
    bound = TOLERANCE_NATS.get(model.dtype, 5e-2)
    if exact:
        difference = float(differences.abs().max())
    else:
        difference = float(differences.square().mean().sqrt())
        noise = float((_native_continuation(model, rows) - reference).square().mean().sqrt())
        bound = max(bound, NOISE_FACTOR * noise)
    unit = "nats per token, largest difference" if exact else "nats per token, root mean square difference"
    cause = "an attention layout that this cache path does not reproduce (sliding windows, sinks, shared layers), or a rotary layout that is not rotate-half"
    return GateResult(gate, model.name, difference, bound, unit, difference <= bound, cause)


@torch.no_grad()
def _strip(model: LoadedModel, rows: Tensor) -> GateResult:
    with pre_rotation_keys(list(model.blocks), model.kv_heads, model.head_dim) as before:
        kv = model.prefill(rows.tolist())
    content = to_content(kv, model.rope)
    worst = max(float((content.keys[i] - before[i].float()).norm() / before[i].float().norm().clamp_min(1e-12)) for i in range(model.layers))
    bound = TOLERANCE_STRIP.get(model.dtype, 2e-2)
    cause = "RoPE settings in the configuration that differ from what the model applies (theta, scaling, partial or interleaved layout)"
    return GateResult("rope_strip", model.name, worst, bound, "relative error of keys, worst layer", worst <= bound, cause)


def _zero(model: LoadedModel, rows: Tensor) -> GateResult:
    kv = _through_content(model, rows)
    zeros = RotatedKV([torch.zeros_like(k) for k in kv.keys], [torch.zeros_like(v) for v in kv.values], kv.lengths)
    gap = float((_standalone(model, rows) - _behind(model, rows, zeros)).mean())
    cause = "the injected cache is ignored, or the model does not use its context"
    return GateResult("zero", model.name, gap, ZERO_GAP_NATS, "nats per token lost with a zeroed cache", gap >= ZERO_GAP_NATS, cause)


def gate_rows(report: GateReport) -> Sequence[tuple[str, str, str, str, str]]:
    """Rows for a table: gate, model, figure, bound, outcome."""
    return [
        (r.gate, r.model, f"{r.figure:.3g}", f"{'>=' if r.gate == 'zero' else '<='} {r.bound:.3g}", "pass" if r.passed else "FAIL")
        for r in report.results
    ]
