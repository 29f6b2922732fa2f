"""Prefix perplexity: half of every chunk of text is scored given the other half as prefix.

All pages are joined without separator and tokenised at once without special tokens; the tokens are cut into non-overlapping chunks
of 2P, a rest is dropped. One item is one chunk: its last P tokens are scored given its first P. It is not lm-eval's rolling
perplexity. Source: arXiv:2608.03893, "prefix perplexity", P = 1,024.

lm-eval hands text to a model, and text cut between two tokens does not always tokenise to the same ones again (with SmolLM2 the
tokenisation or the cut differs in 5 of 74 chunks at P = 1,024). So each item carries its token ids, and `kvxfer` scores exactly those in
every arm (`kvbench.scoring.carried`). Other models, such as `hf`, tokenise the item's text, which is the untouched stretch of the
original; `retokenises` says whether that gives the same tokens and the same cut. Where it does not, the log-likelihood is that of one
or two tokens more or less, still divided by P: below 1 % per chunk in our measurements.

Models that need a begin-of-text token for sensible output (Gemma) get none here: their perplexity compares arms, not models.
"""

from __future__ import annotations

import logging
import math
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from kvbench.errors import BadInputError, KVBenchError
from kvbench.pairs.locate import load_tokenizer, resolve
from kvbench.pairs.tokenizers import tokenizer_fingerprint

log = logging.getLogger("kvbench")
HUB, CONFIG = "EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"


def wikitext2(prefix_tokens: int | str = 1024, data_files: Mapping[str, str] | None = None, **settings: Any) -> dict[str, Dataset]:
    """The items, for lm-eval's `custom_dataset`.

    Args:
        prefix_tokens: P, tokens of the prefix and of the scored rest; from `--metadata '{"prefix_tokens": 512}'`.
        data_files: `test`, a local file of rows with a field `page`; default: WikiText-2 from the hub.
        **settings: lm-eval's metadata, which contains the model's arguments: the tokenizer is that of `tokenizer`, else of `pretrained`,
            `target` or `source`.

    Raises:
        BadInputError: no model is named, P is no number or too large for the model or the text, or the text cannot be had.
    """
    try:
        prefix = _prefix_tokens(prefix_tokens, settings)
        tokenizer = _tokenizer(settings)
        items = chunks(_pages(data_files), tokenizer, prefix)
    except KVBenchError as error:
        if Path(sys.argv[0]).stem in {"lm_eval", "lm-eval"}:
            # lm_eval's command would print a traceback.
            print(f"wikitext2_prefix: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        raise
    changed = sum(not item["retokenises"] for item in items)
    if changed and "source" not in settings:
        log.warning(
            "wikitext2_prefix: as text, %d of %d chunks tokenise differently; kvxfer scores the original tokens, other models the text",
            changed,
            len(items),
        )
    return {"test": Dataset.from_list(items)}


def chunks(pages: Sequence[str], tokenizer: Any, prefix_tokens: int) -> list[dict[str, object]]:
    """Cut text into items.

    Args:
        pages: texts in order.
        tokenizer: a Hugging Face tokenizer.
        prefix_tokens: P.

    Returns:
        Rows with `context` and `continuation` (text), `context_ids` and `continuation_ids` (P token ids each), `tokens` (P), `chunk`,
        `article` (number of the page in which the scored part begins), `retokenises`, `tokenizer` (fingerprint).

    Raises:
        BadInputError: the text has fewer than 2P tokens.
    """
    text = "".join(pages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    ids: list[int] = encoded["input_ids"]
    size = 2 * prefix_tokens
    if len(ids) < size:
        raise BadInputError(
            f"the text has {len(ids)} tokens, fewer than one chunk of 2 x {prefix_tokens}; give a smaller prefix_tokens, or more text"
        )
    cuts = range(0, len(ids) // size * size + 1, prefix_tokens)
    halves = [(ids[begin:end], half) for (begin, end), half in zip(pairwise(cuts), _texts(text, encoded, tokenizer, cuts), strict=True)]
    page_starts = [0, *accumulate(len(page) for page in pages)][:-1]
    read = [0, *accumulate(len(half) for _, half in halves)]
    fingerprint = tokenizer_fingerprint(tokenizer)
    rows: list[dict[str, object]] = []
    for number in range(len(halves) // 2):
        (context_ids, context), (continuation_ids, continuation) = halves[2 * number : 2 * number + 2]
        rows.append(
            {
                "context": context,
                "continuation": continuation,
                "context_ids": context_ids,
                "continuation_ids": continuation_ids,
                "tokens": prefix_tokens,
                "chunk": number,
                "article": bisect_right(page_starts, read[2 * number + 1]) - 1,
                "retokenises": _as_lm_eval(tokenizer, context, continuation) == (context_ids, continuation_ids),
                "tokenizer": fingerprint,
            }
        )
    return rows


def scores(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, tuple[float, int]]:
    """The log-likelihood of the scored half, in nats, with its token count."""
    log_likelihood, _greedy = results[0]
    return {"token_perplexity": (log_likelihood, doc["tokens"])}


def token_perplexity(items: Sequence[tuple[float, int]]) -> float:
    """exp(-nats / tokens) over all chunks; as all have P tokens, exp of the mean of the chunks' mean negative log-likelihoods."""
    return math.exp(-sum(nats for nats, _ in items) / sum(tokens for _, tokens in items))


def _prefix_tokens(value: int | str, settings: Mapping[str, Any]) -> int:
    prefix = int(value) if str(value).isdecimal() else 0
    if prefix < 2:
        raise BadInputError(f"prefix_tokens={value} is not a whole number of at least 2")
    limit = settings.get("max_length")
    if limit is not None and int(limit) < 2 * prefix:
        raise BadInputError(
            f"wikitext2_prefix needs {2 * prefix} positions, but max_length={limit}; give prefix_tokens={int(limit) // 2} or less, or a larger max_length"
        )
    return prefix


def _tokenizer(settings: Mapping[str, Any]) -> Any:
    for key in ("tokenizer", "pretrained", "target", "source"):
        name = settings.get(key)
        if isinstance(name, str) and name.strip():
            gguf = settings.get("gguf_file") if key != "tokenizer" else None
            revision = settings.get("source_revision" if key == "source" else "revision")
            return load_tokenizer(
                resolve(f"{name}/{gguf}" if gguf else name, revision), trust_remote_code=settings.get("trust_remote_code") in (True, "True", "true")
            )
    raise BadInputError(
        "wikitext2_prefix cuts its text by the model's tokens, but no model is named; lm_eval takes it from --model_args pretrained=..., "
        "TaskManager from metadata={'pretrained': ...}"
    )


def _pages(data_files: Mapping[str, str] | None) -> list[str]:
    try:
        rows = load_dataset("json", data_files=dict(data_files), split="test") if data_files else load_dataset(HUB, CONFIG, split="test")
        return list(rows["page"])
    except Exception as error:
        # The hub library and the readers of files raise whatever they stumble over.
        where = data_files.get("test") if data_files else f"{HUB} ({CONFIG})"
        raise BadInputError(
            f"cannot read the text of wikitext2_prefix from {where}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}; "
            "without a network give local rows ('kvbench tasks export --data-dir DIR')"
        ) from error


def _texts(text: str, encoded: Mapping[str, Any], tokenizer: Any, cuts: range) -> list[str]:
    """The text between each cut and the next; the original's, where the tokenizer tells where its tokens lie."""
    if not tokenizer.is_fast:
        ids = encoded["input_ids"]
        return [tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False) for begin, end in pairwise(cuts)]
    starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
    return [text[starts[begin] : starts[end]] for begin, end in pairwise(cuts)]


def _as_lm_eval(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """How a model that is given the text tokenises and cuts it (lm-eval's `_encode_pair`)."""
    bare = context.rstrip()
    whole: list[int] = tokenizer(context + continuation, add_special_tokens=False, verbose=False)["input_ids"]
    kept = len(tokenizer(bare, add_special_tokens=False, verbose=False)["input_ids"])
    return whole[:kept], whole[kept:]
