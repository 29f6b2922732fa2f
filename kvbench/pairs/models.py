"""A loaded causal language model, seen as kvbench needs it: prefill, answer from a cache, read logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.cache_utils import DynamicCache

from kvbench.errors import BadInputError
from kvbench.kv.attention import folded
from kvbench.kv.content import RotatedKV
from kvbench.kv.inject import PrefixCache
from kvbench.kv.masks import as_attention_mask, packed_mask, within_window
from kvbench.kv.rope import Rope
from kvbench.pairs.geometry import geometry_of
from kvbench.pairs.locate import ModelRef, load_tokenizer, resolve

# Backends that take an arbitrary mask; flash attention takes none, so it cannot answer packed continuations.
MASKABLE_BACKENDS = ("sdpa", "eager")
LOGIT_BUDGET = 1 << 26  # float32 logits held at once, 256 MB


@dataclass(frozen=True)
class Query:
    """Tokens that a model runs behind a prefix; see `kvbench.kv.masks.packed_mask` for the segments.

    Attributes:
        ids: `[batch, queries]` token ids.
        positions: `[batch, queries]` absolute positions.
        segments: `[batch, queries]` 0 held-back context, 1.. continuations, -1 padding.
    """

    ids: Tensor
    positions: Tensor
    segments: Tensor


class LoadedModel:
    """One model of a pair.

    Args:
        model: a transformers causal language model, in evaluation mode.
        tokenizer: its tokenizer.
        ref: where it came from.

    Raises:
        BadInputError: an attention backend that takes no mask, or a model without a rotary module.
    """

    def __init__(self, model: Any, tokenizer: Any, ref: ModelRef) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.ref = ref
        self.config = model.config.get_text_config()
        backend = self.config._attn_implementation
        if backend not in MASKABLE_BACKENDS:
            raise BadInputError(f"{ref.name}: attention backend '{backend}' takes no mask; load with one of {', '.join(MASKABLE_BACKENDS)}")
        self.decoder = model.get_decoder()
        self.blocks: Sequence[nn.Module] = self.decoder.layers
        self.layers = len(self.blocks)
        geometry = geometry_of(model.config)
        self.kv_heads, self.head_dim = geometry.kv_heads, geometry.head_dim
        self.dtype: torch.dtype = model.dtype
        self.devices = [next(block.parameters()).device for block in self.blocks]
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.rope = Rope(self.decoder)
        self.window: int | None = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        if types is None:
            types = ["sliding_attention" if self.window and getattr(self.config, "use_sliding_window", True) else "full_attention"] * self.layers
        self.layer_types = frozenset(types)
        self._additive = backend == "eager"
        self._head_is_plain = self._check_head()

    @property
    def name(self) -> str:
        """The model as the user named it."""
        return self.ref.name

    @property
    def attention_backend(self) -> str:
        """Attention implementation in use."""
        return str(self.config._attn_implementation)

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Whether logits are the output embedding applied to the last hidden state, as in most models (not with soft-capping)."""
        probe = torch.arange(4, device=self.device)[None]
        hidden = self.decoder(input_ids=probe, use_cache=False).last_hidden_state
        return bool(torch.equal(self.model.get_output_embeddings()(hidden), self.model(input_ids=probe, use_cache=False).logits))

    @torch.no_grad()
    def prefill(self, rows: Sequence[Sequence[int]], header: RotatedKV | None = None) -> RotatedKV:
        """Run token rows of unequal length, from position 0 or behind a shared `header`, without the language-model head.

        Rows are padded on the right: under causal attention, padding there cannot reach a true token.

        Returns:
            The cache of the rows alone (without the header).
        """
        width = max(1, max(len(row) for row in rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long, device=self.device)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.long, device=self.device)
        lengths = torch.tensor([len(row) for row in rows], device=self.device)
        if header is None:
            cache: Any = DynamicCache()
            positions = torch.arange(width, device=self.device).expand(len(rows), -1)
            self.decoder(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)
            return RotatedKV([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers], lengths)
        start = header.offset + header.tokens
        cache = self.cache_for(len(rows), start + width, start)
        write_prefix(cache, header, slice(None), 0)
        segments = torch.where(torch.arange(width, device=self.device) < lengths[:, None], 0, -1)
        positions = (torch.arange(width, device=self.device) + start).expand(len(rows), -1)
        self.run(cache, Query(ids, positions, segments), start, torch.zeros_like(lengths), 0)
        return RotatedKV([layer.keys[:, :, start:] for layer in cache.layers], [layer.values[:, :, start:] for layer in cache.layers], lengths, start)

    def cache_for(self, batch: int, capacity: int, filled: int) -> PrefixCache:
        """An empty cache of this model's format."""
        return PrefixCache.allocate(self.devices, (batch, self.kv_heads, capacity, self.head_dim), self.dtype, filled)

    @torch.no_grad()
    def run(self, cache: PrefixCache, query: Query, header: int, lengths: Tensor, padded: int, behind: Tensor | None = None) -> Tensor:
        """Run queries behind a cached prefix.

        Args:
            cache: holds `header + padded` prefix tokens (and `behind` tokens of earlier queries).
            query: what to run.
            header: shared header tokens.
            lengths: `[batch]` true tokens of the own prefix.
            padded: padded own-prefix tokens.
            behind: `[batch, earlier]` positions of earlier query tokens in the cache, all visible (decoding).

        Returns:
            Last hidden states `[batch, queries, hidden]`.
        """
        mask = packed_mask(header, lengths, padded, query.segments)
        keys = [torch.arange(header + padded, device=mask.device).expand(mask.shape[0], -1), query.positions]
        if behind is not None:
            split = header + padded
            mask = torch.cat(
                [mask[:, :, :split], torch.ones(*mask.shape[:2], behind.shape[1], dtype=torch.bool, device=mask.device), mask[:, :, split:]], dim=2
            )
            keys.insert(1, behind)
        attention_mask = self._attention_mask(mask, query.positions, torch.cat(keys, dim=1))
        with folded(self.config):
            out = self.decoder(input_ids=query.ids, position_ids=query.positions, attention_mask=attention_mask, cache=cache, use_cache=True)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _attention_mask(self, allowed: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor | dict[str, Tensor]:
        masks = {}
        for kind in sorted(self.layer_types):
            narrowed = allowed
            if kind == "sliding_attention" and self.window is not None:
                narrowed = within_window(allowed, query_positions, key_positions, self.window)
            masks[kind] = as_attention_mask(narrowed, self.dtype, self._additive)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[n, vocabulary]` of hidden states `[n, hidden]`."""
        head = self.model.get_output_embeddings()
        if self._head_is_plain:
            return head(hidden).float()  # type: ignore[no-any-return]
        return _post_processed_logits(self.model, self.decoder, hidden).float()

    def logit_chunk(self) -> int:
        """Hidden states to turn into logits at once."""
        return max(1, LOGIT_BUDGET // int(self.model.get_output_embeddings().weight.shape[0]))


def write_prefix(cache: PrefixCache, kv: RotatedKV, rows: slice, start: int) -> None:
    """Copy `kv` into `rows` of `cache` from token `start`; a batch of one is broadcast."""
    for layer, keys, values in zip(cache.layers, kv.keys, kv.values, strict=True):
        layer.keys[rows, :, start : start + kv.tokens].copy_(keys)
        layer.values[rows, :, start : start + kv.tokens].copy_(values)


def _post_processed_logits(model: Any, decoder: nn.Module, hidden: Tensor) -> Tensor:
    """Logits of models that scale or cap them: the model's own forward, with its decoder standing still.

    A forward hook replaces the decoder's result, so everything the model does after it is the model's own code.
    """

    def replace(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = hidden[None]
        return output

    with hooked(decoder, replace):
        logits: Tensor = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False).logits[0]
    return logits


@contextmanager
def hooked(module: nn.Module, hook: Any) -> Iterator[None]:
    """A forward hook that is gone afterwards, whatever happens."""
    handle = None
    try:
        handle = module.register_forward_hook(hook)
        yield
    finally:
        if handle is not None:
            handle.remove()


def load_model(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    attention: str = "sdpa",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name: hub id, local directory, GGUF file, or `embedded:NAME`.
        revision: hub revision.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: torch device; ignored with `device_map`.
        attention: `sdpa` or `eager`.
        device_map: accelerate's device map (`auto` shards over all devices).
        trust_remote_code: run code that the repository carries.

    Raises:
        BadInputError: it cannot be found, read, or is not a causal language model.
    """
    known = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise BadInputError(f"dtype '{dtype}' is unknown; use one of {', '.join(known)}")
    if attention not in MASKABLE_BACKENDS:
        raise BadInputError(
            f"attention backend '{attention}' takes no mask, which packed continuations need; use one of {', '.join(MASKABLE_BACKENDS)}"
        )
    ref = resolve(name, revision)
    tokenizer = load_tokenizer(ref, trust_remote_code=trust_remote_code)
    kwargs: dict[str, Any] = {"dtype": known[dtype], "attn_implementation": attention, "trust_remote_code": trust_remote_code}
    if ref.gguf_file:
        # Packed GGUF blocks compute in float32 whatever dtype is asked for, so weights are unpacked at load.
        kwargs.update(gguf_file=ref.gguf_file, quantization_config=GgufConfig(dequantize=True))
    if ref.revision:
        kwargs["revision"] = ref.revision
    if device_map:
        kwargs["device_map"] = device_map
    try:
        model = AutoModelForCausalLM.from_pretrained(ref.path, **kwargs)
        if not device_map:
            model = model.to(device)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(f"cannot load model '{name}': {reason}; check the name, the files and the device") from error
    return LoadedModel(model.eval(), tokenizer, ref)
