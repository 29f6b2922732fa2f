"""Whether two tokenizers are the same one (vocabulary, special ids, texts that both must encode alike), and fingerprints that pin a model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvbench.pairs.geometry import text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SPECIAL_NAMES = ("bos", "eos", "unk", "pad")

# Settings that change nothing about the keys and values a model computes.
_NOT_IN_FINGERPRINT = frozenset(
    """architectures attention_dropout auto_map bad_words_ids bos_token_id chunk_size_feed_forward dtype embd_pdrop eos_token_id id2label
    initializer_range label2id output_attentions output_hidden_states pad_token_id pretraining_tp problem_type quantization_config resid_pdrop
    return_dict sep_token_id torch_dtype transformers_version unk_token_id use_cache""".split()  # noqa: SIM905
)

# What tokenizers of one vocabulary still do differently: normal forms, runs of blanks, numbers, code, markers, scripts, very long words.
PROBES: tuple[str, ...] = (
    "",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  three   four    blanks",
    "tab\tand\t\ttabs",
    "line\nbreak\n\nparagraph\r\n\r\nwindows",
    "  \n  \n",
    "0 1 12 123 1234 12345 3.14159 1,000,000 1e-10 0x7f",
    "don't can't I'm we've 'quoted' \"double\"",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    'for (int i = 0; i < n; ++i) { s[i] += "\\n"; }',
    '{"key": [1, 2, null], "url": "https://example.org/a?b=c&d=%20"}',
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<s>[INST] Hi [/INST] Hello</s>",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<|endoftext|>",
    "Donaudampfschifffahrtsgesellschaftskapitänsmütze",
    "a" * 100,
    "CamelCaseAndALLCAPSAndsnake_case_and-kebab-case",
    "naïve café e\u0301 \u212b \ufb01 \u00bd",
    "日本語の文章と漢字、カタカナ。",
    "Привет, как дела? Ελληνικά",
    "שלום עולם مرحبا بالعالم",
    "हिन्दी ไทย 한국어",
    "🙂👩‍👩‍👧‍👦🇪🇺 ✓→∑",
    "zero\u200bwidth no\u00a0break \ufeffmark",
    "Question: What is 17 + 25?\nAnswer:",
)


class Vocabulary(NamedTuple):
    """How two vocabularies differ; all empty if they are one.

    Attributes:
        moved: Strings with unequal ids: (string, source id, target id), by source id.
        only_source: Strings of the source alone, with ids, by id.
        only_target: Strings of the target alone, with ids, by id.
        common: Strings with one id in both.
        last_common_id: The highest such id; -1 without any.
    """

    moved: tuple[tuple[str, int, int], ...]
    only_source: tuple[tuple[str, int], ...]
    only_target: tuple[tuple[str, int], ...]
    common: int
    last_common_id: int

    @property
    def identical(self) -> bool:
        """Whether both map the same strings to the same ids."""
        return not (self.moved or self.only_source or self.only_target)

    @property
    def appended_only(self) -> bool:
        """Whether the one differs from the other by tokens behind everything they share."""
        return not self.moved and all(index > self.last_common_id for _, index in (*self.only_source, *self.only_target))


@dataclass(frozen=True)
class ProbeDifference:
    """The first text that two tokenizers encode differently.

    Attributes:
        text: The probe.
        source_ids: The source's ids.
        target_ids: The target's ids.
        source_tokens: The source's tokens.
        target_tokens: The target's tokens.
        differing: How many probes differ.
    """

    text: str
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    differing: int


def compare_vocabularies(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> Vocabulary:
    """Compare two vocabularies, added tokens included."""
    left: dict[str, int] = source.get_vocab()
    right: dict[str, int] = target.get_vocab()
    shared = left.keys() & right.keys()
    same = [left[token] for token in shared if left[token] == right[token]]
    return Vocabulary(
        moved=tuple(sorted(((token, left[token], right[token]) for token in shared if left[token] != right[token]), key=lambda row: row[1])),
        only_source=tuple(sorted(((token, left[token]) for token in left.keys() - shared), key=lambda row: row[1])),
        only_target=tuple(sorted(((token, right[token]) for token in right.keys() - shared), key=lambda row: row[1])),
        common=len(same),
        last_common_id=max(same, default=-1),
    )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Ids of the special tokens, by short name (`bos`, `eos`, `unk`, `pad`)."""
    return {name: getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL_NAMES}


def first_probe_difference(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> ProbeDifference | None:
    """Encode every probe with both, special tokens added as each does by itself.

    Returns:
        The first difference, or None if all encodings are equal.
    """
    encodings = [(text, _encode(source, text), _encode(target, text)) for text in PROBES]
    differing = [row for row in encodings if row[1] != row[2]]
    if not differing:
        return None
    text, left, right = differing[0]
    return ProbeDifference(text, left, right, _tokens(source, left), _tokens(target, right), len(differing))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A sha256 of how a tokenizer turns text into ids.

    Covers the vocabulary, the backend's model, normaliser, pre-tokeniser and post-processor, and the bos, eos and unk ids. Truncation,
    padding, the pad token and the chat template are left out: evaluation harnesses set them, and they change no id of a text.
    """
    special = special_ids(tokenizer)
    special.pop("pad")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings: dict[str, object] = json.loads(backend.to_str()) if backend is not None else {"class": type(tokenizer).__name__}
    for state in ("truncation", "padding"):
        settings.pop(state, None)
    described = {"vocabulary": tokenizer.get_vocab(), "special": special, "backend": settings}
    return _digest(described)


def config_fingerprint(config: PretrainedConfig) -> str:
    """A sha256 of what a configuration says about keys and values.

    Names, dtype, library version, quantisation, token ids and training settings are left out, and so are settings without a value:
    the same model fingerprints alike from a file, from memory, and in another process.
    """
    return _digest(_canonical(text_config_of(config).to_dict()))


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {
            str(key): _canonical(item)
            for key, item in value.items()
            if item is not None and not str(key).startswith("_") and str(key) not in _NOT_IN_FINGERPRINT
        }
    return [_canonical(item) for item in value] if isinstance(value, (list, tuple)) else value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()).hexdigest()


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def _tokens(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(str(token) for token in tokenizer.convert_ids_to_tokens(list(ids)))
