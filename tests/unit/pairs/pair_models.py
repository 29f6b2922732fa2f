"""Tiny configurations and tokenizers, built in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<unk>", "<pad>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("l", "l"), ("1", "2"))

SaveModel = Callable[..., str]


def byte_vocabulary(extra: tuple[str, ...] = ()) -> dict[str, int]:
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES), *extra]
    return {token: index for index, token in enumerate(tokens)}


def byte_tokenizer(
    vocabulary: dict[str, int] | None = None,
    *,
    digits: bool = False,
    bos: bool = False,
    special: dict[str, str] | None = None,
    added: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `digits` splits numbers into digits before merging, `bos` puts <s> in front."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary or byte_vocabulary(), merges=list(MERGES)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), byte_level]) if digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **(special or {})}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.add_tokens(list(added))
    return wrapped


def llama(**settings: Any) -> PretrainedConfig:
    """A small Llama configuration, any setting replaced."""
    defaults = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    }
    return AutoConfig.for_model("llama", **{**defaults, **settings})
