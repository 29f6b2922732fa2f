"""From lm-eval's logged samples (in memory or from its JSON lines) to sample rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kvbench.errors import BadInputError
from kvbench.runs.schema import SampleRow

Sample: TypeAlias = Mapping[str, Any]
"""A dict of lm-eval's `samples[task]`."""

GROUP_FIELDS = ("conversation", "article", "subject", "turn")
"""Document fields that are kept as group labels."""
_PERPLEXITIES = ("perplexity", "bits_per_byte")
_RESERVED = ("doc_id", "doc", "target", "filter", "doc_hash", "prompt_hash", "target_hash")


def rows_from_lm_eval(
    samples: Iterable[Sample],
    task: str,
    arm: str,
    *,
    higher_is_better: Mapping[str, bool | None] | None = None,
    n_context_tokens: Mapping[int, int] | None = None,
    groups: Mapping[int, Mapping[str, str]] | None = None,
) -> list[SampleRow]:
    """Convert what lm-eval logged for one task.

    A per-item metric that is a number is kept as it is. A pair (log-likelihood, size) of a perplexity-like metric becomes the negative
    log-likelihood and its size. Metrics of other shapes (lists for corpus-wide aggregation) are left out. Where a log-likelihood is
    NaN, the item has no score at all: an argmax over NaN is no answer.

    Args:
        samples: `samples[task]` of `simple_evaluate(log_samples=True)`, or lines of samples_<task>_<date>.jsonl.
        task: lm-eval's task name.
        arm: who answered.
        higher_is_better: direction by metric, from lm-eval's results; None for a metric is left out.
        n_context_tokens: tokens of the context by doc_id, if counted.
        groups: further group labels by doc_id; they replace those found in the document.

    Returns:
        One row per filter and document, in the order given.

    Raises:
        BadInputError: a sample without the fields of lm-eval 0.4.
    """
    directions = {name: bool(value) for name, value in (higher_is_better or {}).items() if value is not None}
    rows = []
    for number, sample in enumerate(samples):
        try:
            rows.append(_row(sample, task, arm, directions, n_context_tokens or {}, groups or {}))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise BadInputError(
                f"sample {number} of task '{task}' (arm '{arm}') is not an lm-eval 0.4 sample: {type(error).__name__} {error}; "
                "write it with lm-eval 0.4.4 or later and --log_samples"
            ) from error
    return rows


def _row(
    sample: Sample, task: str, arm: str, directions: Mapping[str, bool], tokens: Mapping[int, int], labels: Mapping[int, Mapping[str, str]]
) -> SampleRow:
    doc_id, doc = int(sample["doc_id"]), sample["doc"]
    requests = _requests(sample["arguments"])
    logprobs = _logprobs(sample["filtered_resps"], sample["resps"])
    broken = any(math.isnan(value) for value in logprobs)
    metrics, sizes, directions = _metrics(sample, dict(directions), undefined=broken)
    choices = _choices(requests) if len(logprobs) > 1 else ()
    target = sample["target"]
    gold_choice = _gold_choice(target, choices)
    found = {name: str(doc[name]) for name in GROUP_FIELDS if isinstance(doc, Mapping) and isinstance(doc.get(name), str | int)}
    return SampleRow(
        task=task,
        filter=str(sample["filter"]),
        doc_id=doc_id,
        arm=arm,
        doc_hash=str(sample["doc_hash"]),
        prompt_hash=str(sample["prompt_hash"]),
        target_hash=str(sample["target_hash"]),
        request_hash=hashlib.sha256(json.dumps(requests, sort_keys=True, default=str).encode()).hexdigest(),
        metrics=metrics,
        sizes=sizes,
        higher_is_better={name: better for name, better in directions.items() if name in metrics},
        loglikelihoods=tuple(value if math.isfinite(value) else None for value in logprobs),
        choice=max(range(len(logprobs)), key=logprobs.__getitem__) if len(logprobs) > 1 and not broken else None,
        gold=choices[gold_choice].strip() if gold_choice is not None else str(target),
        gold_choice=gold_choice,
        text=None if logprobs else _text(sample["filtered_resps"]),
        response=None if logprobs else _text(sample["resps"]),
        n_context_tokens=tokens.get(doc_id),
        groups=found | {name: str(value) for name, value in labels.get(doc_id, {}).items()},
        prompt=str(requests[0][0]) if requests else "",
        choices=choices,
    )


def _text(answers: object) -> str | None:
    """The first text in nested lists of answers."""
    while isinstance(answers, list | tuple):
        if not answers:
            return ""
        answers = answers[0]
    return answers if isinstance(answers, str) else None


def _requests(arguments: object) -> list[list[object]]:
    """Arguments of each request; on disk they are {"gen_args_0": {"arg_0": ...}}."""
    if isinstance(arguments, Mapping):
        return [[request[f"arg_{i}"] for i in range(len(request))] for request in (arguments[f"gen_args_{n}"] for n in range(len(arguments)))]
    if not isinstance(arguments, Sequence):
        raise TypeError(f"arguments are a {type(arguments).__name__}")
    return [list(request) for request in arguments]


def _logprobs(filtered: Sequence[object], raw: Sequence[Sequence[object]]) -> list[float]:
    """Log-likelihood of each request, or nothing for generated text. On disk they are strings."""
    for answers in (list(filtered), [answer[0] if answer else None for answer in raw]):
        found = [value for value in map(_logprob, answers) if value is not None]
        if found and len(found) == len(answers):
            return found
    return []


def _logprob(answer: object) -> float | None:
    if isinstance(answer, list | tuple) and len(answer) == 2 and str(answer[1]) in ("True", "False"):
        try:
            return float(answer[0])
        except (TypeError, ValueError):
            return None
    return None


def _metrics(sample: Sample, directions: dict[str, bool], *, undefined: bool) -> tuple[dict[str, float | None], dict[str, float], dict[str, bool]]:
    metrics: dict[str, float | None] = {}
    sizes: dict[str, float] = {}
    named = sample.get("metrics")
    names = [str(name) for name in named] if isinstance(named, Sequence) and not isinstance(named, str) else []
    for name in names:
        if name in _RESERVED or name not in sample:
            continue
        value = sample[name]
        perplexity = name.endswith(_PERPLEXITIES)
        if perplexity and isinstance(value, list | tuple) and len(value) == 2:
            value, size = value
            sizes[name] = float(size)
        if not _is_number(value):
            continue
        score = -float(value) if perplexity else float(value)
        metrics[name] = score if math.isfinite(score) and not undefined else None
        if perplexity:
            directions[name] = False
    return metrics, sizes, directions


def _is_number(value: object) -> bool:
    if isinstance(value, list | tuple | Mapping | str) or value is None:
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _choices(requests: Sequence[Sequence[object]]) -> tuple[str, ...]:
    texts = [str(request[1]) for request in requests]
    if len(set(texts)) > 1 or len(texts) == 1:
        return tuple(texts)
    contexts = [str(request[0]) for request in requests]
    # Two strings differ first where their least and greatest do; back to the last space, so that no word is cut.
    least, greatest = min(contexts), max(contexts)
    differs = next((i for i, (a, b) in enumerate(zip(least, greatest, strict=False)) if a != b), len(least))
    cut = least.rfind(" ", 0, differs) + 1
    return tuple(context[cut:] for context in contexts)


def _gold_choice(target: object, choices: Sequence[str]) -> int | None:
    if not choices:
        return None
    text = str(target).strip()
    if text.isdigit() and int(text) < len(choices):
        return int(text)
    stripped = [choice.strip() for choice in choices]
    return stripped.index(text) if stripped.count(text) == 1 else None
