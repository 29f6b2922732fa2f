"""The stored token sequences of a calibration, run again through both models, for recipes that need more than moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvbench.calibration.corpus import TokenBlocks
from kvbench.calibration.moments import Calibration
from kvbench.errors import ArtifactError, BadInputError
from kvbench.kv.capture import finite_or_raise, to_content
from kvbench.kv.content import ContentKV, RotatedKV
from kvbench.pairs.models import LoadedModel, load_model
from kvbench.pairs.pins import check_pin, pin

TOKENS_FILE = "tokens.safetensors"


def save_tokens(blocks: TokenBlocks, directory: Path) -> None:
    """Write the token blocks of both parts beside the moments."""
    parts = {"fit": blocks.fit, "heldout": blocks.heldout}
    save_file({name: torch.from_numpy(np.array(part, dtype=np.int32)) for name, part in parts.items()}, str(directory / TOKENS_FILE))


def load_tokens(calibration: Calibration) -> TokenBlocks:
    """The token blocks that a calibration ran over.

    Raises:
        ArtifactError: written before tokens were stored, or not the tokens of these moments.
    """
    path = calibration.path / TOKENS_FILE
    if not path.is_file():
        raise ArtifactError(f"'{calibration.path}' has no {TOKENS_FILE}, which this recipe runs through the models; calibrate again")
    tensors = load_file(str(path))
    data = calibration.manifest["data"]
    fit, heldout = (np.asarray(tensors[name].numpy(), dtype=np.int32) for name in ("fit", "heldout"))
    blocks = TokenBlocks(fit, heldout, int(data.get("fit_documents", 0)), int(data.get("heldout_documents", 0)))
    if blocks.fingerprint() != data["fingerprint"]:
        raise ArtifactError(
            f"'{path}' holds other tokens ({blocks.fingerprint()[:12]}) than the moments were taken from "
            f"({str(data['fingerprint'])[:12]}); calibrate again"
        )
    return blocks


def pair_of(calibration: Calibration, models: tuple[LoadedModel, LoadedModel] | None) -> tuple[LoadedModel, LoadedModel]:
    """Source and target of a calibration: those given, or loaded by the names in its manifest; pins are checked either way.

    Raises:
        BadInputError: a model cannot be loaded.
        ArtifactError: a model is not the one that was calibrated.
    """
    out = []
    for i, role in enumerate(("source", "target")):
        stored: dict[str, Any] = calibration.manifest[role]
        model = models[i] if models is not None else _load(stored)
        check_pin(stored, pin(model), role, f"calibration '{calibration.path}'")
        out.append(model)
    return out[0], out[1]


def _load(stored: dict[str, Any]) -> LoadedModel:
    return load_model(stored["name"], revision=stored.get("revision"), dtype=stored["dtype"], attention=stored["attention_backend"])


@dataclass(frozen=True)
class PairBatch:
    """Some sequences through both models.

    Attributes:
        source: content of the source (all its layers).
        target: content of the target.
        target_rotated: the target's cache as it is, keys with RoPE.
        queries: per target layer `[batch, tokens, query_heads, head_dim]` float32 with RoPE, or empty where not asked for.
    """

    source: ContentKV
    target: ContentKV
    target_rotated: RotatedKV
    queries: tuple[Tensor, ...]


@torch.no_grad()
def run_pair(source: LoadedModel, target: LoadedModel, rows: NDArray[np.int32], *, queries: bool, strip: bool = True, where: str = "") -> PairBatch:
    """Prefill the same sequences in both models.

    Args:
        source: the model that prefills.
        target: the model that answers.
        rows: `[batch, tokens]`.
        queries: also record the target's own queries.
        strip: remove RoPE from keys (off for the rotated-keys ablation).
        where: which batch, for messages.

    Raises:
        BadInputError: non-finite activations.
    """
    tokens = rows.tolist()
    from_source = source.prefill(tokens)
    finite_or_raise(from_source, source.name, where)
    if queries:
        with recorded_queries(target) as seen:
            from_target = target.prefill(tokens)
        cos, sin = target.rope.cos_sin(from_target.positions()[:1])
        asked = tuple(target.rope.apply(seen[layer], cos, sin) for layer in range(target.layers))
    else:
        from_target, asked = target.prefill(tokens), ()
    finite_or_raise(from_target, target.name, where)
    return PairBatch(to_content(from_source, source.rope, strip=strip), to_content(from_target, target.rope, strip=strip), from_target, asked)


def batches(rows: NDArray[np.int32], size: int) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """(First sequence, sequences) in order."""
    for first in range(0, len(rows), size):
        yield first, rows[first : first + size]


@contextmanager
def recorded_queries(model: LoadedModel) -> Iterator[dict[int, Tensor]]:
    """Record each layer's queries before RoPE while the model runs: the output of `q_norm` where there is one, else of `q_proj`.

    Yields:
        Layer index -> `[batch, tokens, query_heads, head_dim]`, filled by the forward passes inside the context.

    Raises:
        BadInputError: an attention module without `q_norm` and `q_proj`.
    """
    seen: dict[int, Tensor] = {}
    handles = []

    def recorder(layer: int) -> Callable[[nn.Module, object, Tensor], None]:
        def record(_module: nn.Module, _args: object, output: Tensor) -> None:
            heads = output.detach()
            # A norm over heads may see [batch, heads, tokens, dim]; token-major is what the projections write.
            if heads.dim() == 4 and heads.shape[1] == query_heads(model) and heads.shape[2] != query_heads(model):
                heads = heads.transpose(1, 2)
            seen[layer] = heads.reshape(heads.shape[0], -1, query_heads(model), model.head_dim)

        return record

    try:
        for index, block in enumerate(model.blocks):
            attention = getattr(block, "self_attn", None)
            module = getattr(attention, "q_norm", None) or getattr(attention, "q_proj", None)
            if not isinstance(module, nn.Module):
                raise BadInputError(f"layer {index} ({type(attention).__name__}) has neither q_norm nor q_proj, so its queries cannot be read")
            handles.append(module.register_forward_hook(recorder(index)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def query_heads(model: LoadedModel) -> int:
    """Query heads per layer."""
    return int(model.config.num_attention_heads)


def attention_scale(model: LoadedModel, layer: int) -> float:
    """What a layer multiplies query-key products with."""
    scaling = getattr(getattr(model.blocks[layer], "self_attn", None), "scaling", None)
    return float(scaling) if scaling is not None else float(model.head_dim) ** -0.5


def layer_window(model: LoadedModel, layer: int) -> int | None:
    """Sliding window of a layer in tokens, None where it sees everything."""
    types: Sequence[str] | None = getattr(model.config, "layer_types", None)
    kind = types[layer] if types is not None else next(iter(model.layer_types))
    return model.window if kind == "sliding_attention" else None


def refuse_unusual_attention(model: LoadedModel) -> None:
    """Refuse models whose attention is more than a softmax over scaled products.

    Raises:
        BadInputError: soft-capped scores or attention sinks.
    """
    capped = getattr(model.config, "attn_logit_softcapping", None)
    sinks = any(hasattr(getattr(block, "self_attn", None), "sinks") for block in model.blocks)
    if capped or sinks:
        what = "attention sinks" if sinks else "soft-capped attention scores"
        raise BadInputError(f"'{model.name}' uses {what}, which recipes that read attention do not reproduce; use ridge or head_local")
