"""Whether the target says the same on a mapped prefix as on its own: distributions, attention outputs on the way, greedy continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvbench.errors import BadInputError
from kvbench.kv.inject import PrefixCache
from kvbench.pairs.models import LoadedModel, Query

Floats = NDArray[np.float64]
TOP = 5


@torch.no_grad()
def run_behind(model: LoadedModel, cache: PrefixCache, ids: Tensor, start: int) -> Tensor:
    """Run the same number of tokens in every row behind a cache of `start` tokens, which is as before afterwards.

    Args:
        model: that answers.
        cache: holds `start` tokens in every row.
        ids: `[batch, tokens]`.
        start: position of the first of them.

    Returns:
        Last hidden states, `[batch, tokens, hidden]`.
    """
    batch, count = ids.shape
    positions = (torch.arange(count, device=ids.device) + start).expand(batch, -1)
    lengths = torch.full((batch,), start, device=ids.device)
    hidden = model.run(cache, Query(ids, positions, torch.zeros_like(ids)), 0, lengths, start)
    cache.rewind(start)
    return hidden


@torch.no_grad()
def compare_predictions(
    own_model: LoadedModel, own: Tensor, other_model: LoadedModel, other: Tensor, wanted: Tensor, *, chunk: int | None = None
) -> dict[str, Floats]:
    """Next-token distributions of two runs over the same positions.

    Args:
        own_model: whose head turns `own` into logits.
        own: hidden states of the reference, `[batch, positions, hidden]`.
        other_model: the same for the run under test (another model for the source baseline).
        other: its hidden states.
        wanted: `[batch, positions]` true next tokens.
        chunk: positions whose logits are held at once.

    Returns:
        Mean over positions by name, each `[batch]`: kl_nats KL(own || other), top1_agreement, top5_overlap, nll_difference (other minus own).
    """
    size = chunk or max(1, min(own_model.logit_chunk(), other_model.logit_chunk()) // 2)
    out: dict[str, list[float]] = {"kl_nats": [], "top1_agreement": [], "top5_overlap": [], "nll_difference": []}
    for row in range(own.shape[0]):
        sums = dict.fromkeys(out, 0.0)
        for first in range(0, own.shape[1], size):
            part = slice(first, first + size)
            a, b = own_model.logits(own[row, part]), other_model.logits(other[row, part])
            # Tables may be padded to unequal sizes behind the last token.
            common = min(a.shape[-1], b.shape[-1])
            p, q = a[:, :common].log_softmax(-1), b[:, :common].log_softmax(-1)
            truth = wanted[row, part, None].to(p.device)
            sums["kl_nats"] += float((p.exp() * (p - q)).sum(-1).double().sum())
            sums["nll_difference"] += float((p.gather(-1, truth) - q.gather(-1, truth)).double().sum())
            tops = p.topk(min(TOP, common), -1).indices, q.topk(min(TOP, common), -1).indices
            sums["top1_agreement"] += float((p.argmax(-1) == q.argmax(-1)).double().sum())
            sums["top5_overlap"] += float((tops[0][:, :, None] == tops[1][:, None, :]).any(-1).double().mean(-1).sum())
        for name, total in sums.items():
            out[name].append(total / own.shape[1])
    return {name: np.array(values) for name, values in out.items()}


@torch.no_grad()
def greedy(model: LoadedModel, cache: PrefixCache, first: Tensor, start: int, steps: int) -> NDArray[np.int64]:
    """Greedy continuation of every row; the cache is as before afterwards.

    Args:
        model: that answers.
        cache: holds `start` tokens in every row, with room for `steps`.
        first: `[batch]` the held-back token.
        start: its position.
        steps: tokens to generate.

    Returns:
        `[batch, steps]` token ids.
    """
    batch = first.shape[0]
    ids = first.to(model.device)[:, None]
    lengths = torch.full((batch,), start, device=ids.device)
    said = []
    for step in range(steps):
        at = torch.full((batch, 1), start + step, device=ids.device)
        behind = (torch.arange(step, device=ids.device) + start).expand(batch, -1) if step else None
        hidden = model.run(cache, Query(ids, at, torch.zeros_like(ids)), 0, lengths, start, behind)
        ids = model.logits(hidden[:, -1]).argmax(-1)[:, None]
        said.append(ids)
    cache.rewind(start)
    return torch.cat(said, dim=1).cpu().numpy()


def greedy_figures(own: NDArray[np.int64], other: NDArray[np.int64]) -> dict[str, Floats]:
    """Share of equal tokens, and tokens before the first difference, each `[batch]`."""
    same = own == other
    return {"greedy_agreement": same.mean(1), "greedy_identical_tokens": np.cumprod(same, axis=1).sum(1).astype(np.float64)}


@contextmanager
def output_inputs(model: LoadedModel, receive: Sequence[Tensor] | None = None) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Record the input of every attention block's output projection, or compare it with an earlier recording.

    Args:
        model: that runs inside the context.
        receive: recording to compare with, by layer; None records.

    Yields:
        Recorded inputs by layer (empty when comparing), and cosines by layer `[batch, tokens, query_heads]` (empty when recording).

    Raises:
        BadInputError: an attention block without `o_proj`.
    """
    seen: dict[int, Tensor] = {}
    cosines: dict[int, Tensor] = {}
    heads = int(model.config.num_attention_heads)

    def hook(layer: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found = args[0].detach().reshape(*args[0].shape[:-1], heads, -1).float()
            if receive is None:
                seen[layer] = found
            else:
                cosines[layer] = torch.nn.functional.cosine_similarity(found, receive[layer], dim=-1)

        return record

    with ExitStack() as stack:
        for index, block in enumerate(model.blocks):
            module = getattr(getattr(block, "self_attn", None), "o_proj", None)
            if not isinstance(module, nn.Module):
                raise BadInputError(f"layer {index} of '{model.name}' has no o_proj, so its attention output cannot be read")
            stack.callback(module.register_forward_pre_hook(hook(index)).remove)
        yield seen, cosines
