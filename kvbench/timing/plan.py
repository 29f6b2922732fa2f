"""What a pair will need, from its two configurations alone: sizes counted, times estimated by a stated rule. No weights, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvbench.calibration.planning import available_bytes
from kvbench.calibration.planning import plan as moments_plan
from kvbench.errors import BadInputError
from kvbench.pairs.geometry import Geometry, geometry_of, text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_ROWS = 4096
"""Rows between two products (kvbench.calibration.harvest)."""
DEFAULT_K = 8
"""The paper's."""
BLOCK_ROWS = 512
"""Rows that are mapped at once (kvbench.kv.kernels)."""
ACTIVATION_WIDTHS = 12
"""Activations of a prefill, in hidden widths per token: residual stream, norms, queries, and the MLP's gate, up and product of about three widths each."""
RECIPES = ("ridge", "head_local", "attn_repair", "low_rank", "residual", "mlp")


@dataclass(frozen=True)
class PlanSettings:
    """What is planned for; the defaults are the paper's.

    Attributes:
        k: source layers per target layer, or `all`.
        recipe: one of `RECIPES`.
        rank: of `low_rank`.
        hidden: units of `mlp` layers, or the bottleneck of `residual`; None takes 1,024 and 256.
        sequences: calibration sequences.
        heldout: held-out sequences.
        seq_len: tokens of each.
        stride: every stride-th token is a row.
        dtype: of weights and cache.
        lengths: context tokens to plan for.
        batch: contexts at once in an evaluation.
        arms: arms of an evaluation.
    """

    k: int | str = 8
    recipe: str = "ridge"
    rank: int | None = None
    hidden: int | None = None
    sequences: int = 500
    heldout: int = 50
    seq_len: int = 1024
    stride: int = 4
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = (1024, 8192, 32768)
    batch: int = 8
    arms: int = 4

    def check(self, source: Geometry) -> None:
        """Refuse what cannot be planned.

        Raises:
            BadInputError: an unknown name, or a number that is not positive or beyond the pair.
        """
        if self.recipe not in RECIPES:
            raise BadInputError(f"recipe '{self.recipe}' has no plan; it is one of {', '.join(RECIPES)}")
        if self.dtype not in ELEMENT_BYTES:
            raise BadInputError(f"dtype '{self.dtype}' is unknown; use one of {', '.join(ELEMENT_BYTES)}")
        if self.k != "all" and not (isinstance(self.k, int) and 1 <= self.k <= source.layers):
            raise BadInputError(f"k = {self.k}, but the source has {source.layers} layers; use 1 to {source.layers}, or all")
        if self.recipe == "low_rank" and not self.rank:
            raise BadInputError("recipe 'low_rank' needs --rank")
        numbers = {"sequences": self.sequences, "seq_len": self.seq_len, "stride": self.stride, "batch": self.batch, "arms": self.arms}
        if wrong := [f"{name} = {value}" for name, value in numbers.items() if value < 1]:
            raise BadInputError(f"{wrong[0]}; it must be at least 1")
        if not self.lengths or any(n < 1 for n in self.lengths):
            raise BadInputError(f"lengths {','.join(map(str, self.lengths))}: they must be positive")


class Rates(NamedTuple):
    """What times are estimated with.

    Attributes:
        operations: matrix products in the models' dtype, operations per second.
        operations64: the same in float64 (solving).
        bandwidth: bytes per second.
        rule: where they come from, in words.
    """

    operations: float
    operations64: float
    bandwidth: float
    rule: str


class Stage(NamedTuple):
    """One stage of the way.

    Attributes:
        name: calibrate, fit, apply, evaluate, ...
        tokens: context length; None where it does not matter.
        parts: bytes by purpose.
        operations: counted; None where there is nothing to estimate.
        seconds: estimate at the full rate; None without rates.
    """

    name: str
    tokens: int | None
    parts: dict[str, int]
    operations: int | None
    seconds: float | None

    @property
    def peak_bytes(self) -> int:
        """All parts at once."""
        return sum(self.parts.values())


class PairPlan(NamedTuple):
    """The whole plan.

    Attributes:
        source_parameters: of the source; None where the configuration does not tell.
        target_parameters: of the target.
        mapper_parameters: entries of all matrices (biases not counted, as in the paper).
        artifact_bytes: stored size by dtype, biases included.
        layer_bytes: weights of one target layer in the models' dtype.
        moments_bytes: moments file of both parts, keys and values, on disk.
        source_cache_bytes_per_token: of the source.
        target_cache_bytes_per_token: of the target.
        stages: peaks and times.
        available_bytes: memory of this machine.
    """

    source_parameters: int | None
    target_parameters: int | None
    mapper_parameters: int
    artifact_bytes: dict[str, int]
    layer_bytes: int
    moments_bytes: int
    source_cache_bytes_per_token: int
    target_cache_bytes_per_token: int
    stages: tuple[Stage, ...]
    available_bytes: int


def kv_width(geometry: Geometry) -> int:
    """KV heads times head width."""
    return geometry.kv_heads * geometry.head_dim


def cache_bytes_per_token(geometry: Geometry, element: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * geometry.layers * kv_width(geometry) * element


def mapper_sizes(source: Geometry, target: Geometry, settings: PlanSettings) -> tuple[int, int]:
    """Matrix entries and biases of a mapper.

    Full head: `2 * L_t * (k * source width) * target width` (the paper's `2 L_t n_kv (k n_kv d_h) d_h`).
    Head local: KV heads times fewer. Low rank: `2 L_t rank (k * source width + target width)`. Residual: full head plus
    `2 L_t bottleneck (k * source width + target width)`. MLP, per head: `features * h + h * h + h * d_h`.

    Returns:
        Entries of the matrices, and of the biases.
    """
    layers, width_in, width = target.layers, _k(source, settings) * kv_width(source), kv_width(target)
    full = 2 * layers * width_in * width
    biases = 2 * layers * width
    match settings.recipe:
        case "head_local" | "attn_repair":
            # Attention repair reweights the head-local fit of arXiv:2609.00891.
            return full // target.kv_heads, biases
        case "low_rank":
            return 2 * layers * (settings.rank or 0) * (width_in + width), biases
        case "residual":
            hidden = settings.hidden or 256
            return full + 2 * layers * hidden * (width_in + width), 2 * biases + 2 * layers * hidden
        case "mlp":
            hidden = settings.hidden or 1024
            per_head = width_in * hidden + hidden * hidden + hidden * target.head_dim
            return 2 * layers * target.kv_heads * per_head, biases + 2 * layers * target.kv_heads * 2 * hidden
        case _:
            return full, biases


def block_bytes(source: Geometry, target: Geometry, features: int, tokens: int, element: int) -> int:
    """Beside caches and weights of one layer while a mapper is applied: a block of source content, one design matrix, and rotation in float32."""
    return min(tokens, BLOCK_ROWS) * (source.layers * kv_width(source) * element + features * element + 12 * kv_width(target))


def content_bytes(source: Geometry, tokens: int, element: int) -> int:
    """Content of a source cache that several mappers share in an evaluation: keys in float32, and design matrices of keys and values."""
    return tokens * source.layers * kv_width(source) * (4 + (2 * element if element < 4 else element))


def activation_bytes(models: Sequence[Geometry], tokens: int, element: int) -> int:
    """Of one prefill, the larger model's; about."""
    return tokens * ACTIVATION_WIDTHS * max(g.hidden_size for g in models) * element


def _k(source: Geometry, settings: PlanSettings) -> int:
    return source.layers if settings.k == "all" else int(settings.k)


class Planned(NamedTuple):
    """A model of the plan.

    Attributes:
        geometry: its shape.
        body_parameters: without embedding tables; None where the configuration does not tell.
    """

    geometry: Geometry
    body_parameters: int | None


def planned(config: PretrainedConfig) -> Planned:
    """Read a model's shape and size from its configuration."""
    geometry = geometry_of(config)
    tables = 1 if text_config_of(config).tie_word_embeddings else 2
    return Planned(geometry, None if geometry.parameters is None else geometry.parameters - tables * geometry.vocab_size * geometry.hidden_size)


def prefill_operations(model: Planned, tokens: int) -> int | None:
    """`2 * body parameters * tokens` plus attention `4 * layers * query width * tokens (tokens + 1) / 2`; None where the size is unknown."""
    if model.body_parameters is None:
        return None
    g = model.geometry
    return 2 * model.body_parameters * tokens + 2 * g.layers * g.query_heads * g.head_dim * tokens * (tokens + 1)


def plan_pair(source_model: Planned, target_model: Planned, settings: PlanSettings, rates: Rates | None = None) -> PairPlan:
    """Count everything.

    Args:
        source_model: the model that prefills.
        target_model: the model that answers.
        settings: what is planned for.
        rates: for the time estimates; None leaves them out.

    Raises:
        BadInputError: settings that do not suit the pair.
    """
    source, target = source_model.geometry, target_model.geometry
    settings.check(source)
    element = ELEMENT_BYTES[settings.dtype]
    entries, biases = mapper_sizes(source, target, settings)
    layer = (entries + biases) // target.layers * element
    weights = {role: g.parameters * element for role, g in (("source weights", source), ("target weights", target)) if g.parameters is not None}
    caches = cache_bytes_per_token(source, element), cache_bytes_per_token(target, element)
    px, py = source.layers * kv_width(source), target.layers * kv_width(target)
    moments = moments_plan(px=px, py=py, kinds=2, at_once=2, chunk_rows=CHUNK_ROWS, models=0)
    stored = 2 * 2 * 8 * (px * px + px * py + px + 2 * py)
    stages = [
        _calibrate(source_model, target_model, settings, moments.moments, moments.rows, weights, rates),
        _fit(source, target, settings, entries, stored, rates),
    ]
    for tokens in settings.lengths:
        stages += _at_length(source_model, target_model, settings, tokens, entries, layer, caches, weights, rates)
    return PairPlan(
        source_parameters=source.parameters,
        target_parameters=target.parameters,
        mapper_parameters=entries,
        artifact_bytes={name: (entries + biases) * size for name, size in ELEMENT_BYTES.items() if name != "float16"},
        layer_bytes=layer,
        moments_bytes=stored,
        source_cache_bytes_per_token=caches[0],
        target_cache_bytes_per_token=caches[1],
        stages=tuple(stages),
        available_bytes=available_bytes(),
    )


def _calibrate(source: Planned, target: Planned, s: PlanSettings, moments: int, rows: int, weights: dict[str, int], rates: Rates | None) -> Stage:
    sequences = s.sequences + s.heldout
    passes = [prefill_operations(g, s.seq_len) for g in (source, target)]
    px, py = (m.geometry.layers * kv_width(m.geometry) for m in (source, target))
    counted = sequences * -(-s.seq_len // s.stride)
    operations = None
    if all(p is not None for p in passes):
        operations = sequences * sum(p or 0 for p in passes) + 2 * 2 * counted * (px * px + px * py)
    return Stage("calibrate", None, {"moments": moments, "rows": rows, **weights}, operations, _seconds(operations, 0, rates))


def _fit(source: Geometry, target: Geometry, s: PlanSettings, entries: int, stored: int, rates: Rates | None) -> Stage:
    width, k = kv_width(source), _k(source, s)
    py = target.layers * kv_width(target)
    features = k * width
    # Keys and values: one factor per source layer for all target layers to select, one per target layer to solve (one for all when k is all).
    solves, columns = (1, py) if k == source.layers else (target.layers, kv_width(target))
    factors = 2 * (source.layers * (width**3 // 3 + 2 * width**2 * py) + solves * (features**3 // 3 + 2 * features**2 * columns))
    parts = {"moments, mapped from disk": stored, "factor": 2 * 8 * features**2, "solution": 3 * 8 * features * columns, "artifact": 4 * entries}
    return Stage("fit", None, parts, factors, None if rates is None else factors / rates.operations64)


def _at_length(
    source: Planned,
    target: Planned,
    s: PlanSettings,
    tokens: int,
    entries: int,
    layer: int,
    caches: tuple[int, int],
    weights: dict[str, int],
    rates: Rates | None,
) -> list[Stage]:
    element = ELEMENT_BYTES[s.dtype]
    mapped = {"source cache": tokens * caches[0], "target cache": tokens * caches[1]}
    own, others = (prefill_operations(g, tokens) for g in (target, source))
    target_weights, source_weights = weights.get("target weights", 0), weights.get("source weights", 0)
    mapping = 2 * tokens * entries
    moved = sum(mapped.values()) + entries * element
    evaluation = s.batch * tokens * (s.arms * caches[1] + caches[0])
    g, h = source.geometry, target.geometry
    block = block_bytes(g, h, _k(g, s) * kv_width(g), tokens, element)
    content, activations = content_bytes(g, s.batch * tokens, element), activation_bytes((g, h), s.batch * tokens, element)
    return [
        Stage(
            "target prefill",
            tokens,
            {"target weights": target_weights, "target cache": tokens * caches[1]},
            own,
            _seconds(own, target_weights, rates),
        ),
        Stage(
            "source prefill",
            tokens,
            {"source weights": source_weights, "source cache": tokens * caches[0]},
            others,
            _seconds(others, source_weights, rates),
        ),
        Stage("apply", tokens, {**mapped, "one layer of the mapper": layer, "block of content": block}, mapping, _seconds(mapping, moved, rates)),
        Stage(
            f"evaluate, {s.batch} x {s.arms} arms",
            tokens,
            {**weights, "caches": evaluation, "content": content, "activations, about": activations},
            None,
            None,
        ),
    ]


def _seconds(operations: int | None, moved: int, rates: Rates | None) -> float | None:
    """The larger of operations over rate and bytes over bandwidth."""
    if operations is None or rates is None:
        return None
    return max(operations / rates.operations, moved / rates.bandwidth)


def given_rates(tflops: float, bandwidth_gb: float | None, tflops64: float | None) -> Rates:
    """Rates of another machine, as given.

    Raises:
        BadInputError: not positive.
    """
    values = {"--tflops": tflops, "--bandwidth": bandwidth_gb, "--tflops64": tflops64}
    if wrong := [f"{name} {value}" for name, value in values.items() if value is not None and not value > 0]:
        raise BadInputError(f"{wrong[0]}; it must be positive")
    double = tflops64 if tflops64 is not None else tflops / 2
    rule = f"given: {tflops:g} Tflop/s, float64 {double:g} Tflop/s{'' if tflops64 else ' (half of it)'}"
    rule += f", {bandwidth_gb:g} GB/s" if bandwidth_gb else ", bandwidth not counted"
    return Rates(1e12 * tflops, 1e12 * double, 1e9 * bandwidth_gb if bandwidth_gb else float("inf"), rule)


def lines_of(found: PairPlan, stages: Sequence[str]) -> list[str]:
    """One line per named stage, for the commands that say their plan first."""
    out = []
    for stage in found.stages:
        if stage.name.split(",")[0] in stages:
            parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in stage.parts.items())
            at = f" at {stage.tokens:,} tokens" if stage.tokens else ""
            out.append(f"plan, {stage.name}{at}: {parts} = {stage.peak_bytes / 1e9:.2f} GB of {found.available_bytes / 1e9:.1f} GB available")
    return out
