"""Made-up answers in lm-eval 0.4.13's sample schema: what `simple_evaluate(log_samples=True)` returns, and what it writes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = ("horse", "rabbit", "snake", "dog", "cat", "goat", "owl", "fox")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hashes(doc: Mapping[str, object], prompt: str, target: object) -> dict[str, str]:
    return {"doc_hash": _hash(json.dumps(doc, indent=2)), "prompt_hash": _hash(prompt), "target_hash": _hash(str(target))}


def _stable(key: str, doc_id: int) -> np.random.Generator:
    return np.random.default_rng([int(_hash(key)[:8], 16), doc_id])


def choice_samples(
    task: str,
    n: int,
    accuracy: float,
    arm: str,
    *,
    choices: int = 4,
    group: tuple[str, int] | None = None,
    nan_at: Sequence[int] = (),
    shots: int = 0,
) -> list[dict[str, Any]]:
    """Multiple choice: items have a difficulty shared by all arms, so that arms agree as real ones do."""
    samples = []
    for doc_id in range(n):
        shared, own = _stable(task, doc_id), _stable(f"{task} {arm}", doc_id)
        options = [_WORDS[i] for i in shared.permutation(len(_WORDS))[:choices]]
        gold = int(shared.integers(choices))
        right = 0.75 * shared.random() + 0.25 * own.random() < accuracy
        pick = gold if right else int((gold + 1 + own.integers(choices - 1)) % choices)
        doc: dict[str, object] = {"question": f"Which animal is number {doc_id} of {task}?", "choices": options, "gold": gold}
        if group is not None:
            doc[group[0]] = doc_id // group[1]
        prompt = "".join(f"Question: example {i}?\nAnswer: owl\n\n" for i in range(shots)) + f"Question: {doc['question']}\nAnswer:"
        logprobs = [float(-3 - 4 * own.random()) for _ in options]
        logprobs[pick] = float(-0.1 - own.random())
        if doc_id in nan_at:
            logprobs[0] = math.nan
        resps = [[(value, i == pick)] for i, value in enumerate(logprobs)]
        samples.append(
            {
                "doc_id": doc_id, "doc": doc, "target": gold, "arguments": [(prompt, f" {option}") for option in options],
                "resps": resps, "filtered_resps": [resp[0] for resp in resps], "filter": "none", "metrics": ["acc", "acc_norm"],
                **_hashes(doc, prompt, gold), "acc": float(pick == gold), "acc_norm": float(pick == gold),
            }
        )  # fmt: skip
    return samples


def sum_samples(task: str, n: int, accuracy: float, arm: str) -> list[dict[str, Any]]:
    """Generated answers with two filters, as gsm8k has."""
    samples = []
    for name in ("strict-match", "flexible-extract"):
        for doc_id in range(n):
            shared, own = _stable(task, doc_id), _stable(f"{task} {arm}", doc_id)
            a, b = (int(v) for v in shared.integers(1, 40, size=2))
            answer = a + b if 0.6 * shared.random() + 0.4 * own.random() < accuracy else a + b + int(own.integers(1, 5))
            doc = {"question": f"What is {a} plus {b}?", "answer": str(a + b)}
            prompt = f"Question: {doc['question']}\nAnswer:"
            arguments = [(prompt, {"until": ["\n"], "do_sample": False, "max_gen_toks": 8})]
            samples.append(
                {
                    "doc_id": doc_id, "doc": doc, "target": str(a + b), "arguments": arguments, "resps": [[f" It is {answer}."]],
                    "filtered_resps": [str(answer)], "filter": name, "metrics": ["exact_match"], **_hashes(doc, prompt, a + b),
                    "exact_match": float(answer == a + b),
                }
            )  # fmt: skip
    return samples


def prefix_samples(task: str, n: int, nats_per_token: float, arm: str) -> list[dict[str, Any]]:
    """Scored text: (log-likelihood, tokens) per document."""
    samples = []
    for doc_id in range(n):
        shared, own = _stable(task, doc_id), _stable(f"{task} {arm}", doc_id)
        tokens = int(shared.integers(40, 80))
        nats = tokens * (nats_per_token + 0.3 * shared.standard_normal() + 0.03 * own.standard_normal())
        doc = {"context": f"The story of {doc_id} begins.", "continuation": " And so on.", "tokens": tokens}
        prompt = str(doc["context"])
        samples.append(
            {
                "doc_id": doc_id, "doc": doc, "target": doc["continuation"], "arguments": [(prompt, doc["continuation"])],
                "resps": [[(-nats, False)]], "filtered_resps": [(-nats, False)], "filter": "none", "metrics": ["token_perplexity"],
                **_hashes(doc, prompt, doc["continuation"]), "token_perplexity": (-nats, tokens),
            }
        )  # fmt: skip
    return samples


def f1_samples(task: str, conversations: int, turns: int, level: float, arm: str) -> list[dict[str, Any]]:
    """Graded answers of conversations, one item per turn."""
    samples = []
    for doc_id in range(conversations * turns):
        shared, own = _stable(task, doc_id // turns), _stable(f"{task} {arm}", doc_id)
        score = float(np.clip(level + 0.15 * shared.standard_normal() + 0.1 * own.standard_normal(), 0, 1))
        doc = {"story": f"Story {doc_id // turns}", "conversation": f"c{doc_id // turns}", "turn": doc_id % turns + 1}
        prompt = f"Story {doc_id // turns}\nQ{doc['turn']}:"
        samples.append(
            {
                "doc_id": doc_id, "doc": doc, "target": "a tale", "arguments": [(prompt, {"until": ["\n"]})], "resps": [["tale"]],
                "filtered_resps": ["tale"], "filter": "none", "metrics": ["f1", "em"], **_hashes(doc, prompt, "a tale"),
                "f1": score, "em": 0.0,
            }
        )  # fmt: skip
    return samples


def write_lm_eval_folder(
    directory: Path,
    tasks: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    model: str = "hf",
    model_args: Mapping[str, str] | None = None,
    limit: float | None = None,
    shots: Mapping[str, int] | None = None,
    date: str = "2026-01-02T03-04-05.000001",
) -> Path:
    """Write what `lm_eval --log_samples --output_path DIRECTORY` writes (evaluation_tracker.py of 0.4.13)."""
    model_args = model_args or {"pretrained": "/models/" + directory.name}
    inner = directory / str(model_args["pretrained"]).replace("/", "__")
    inner.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "results": {}, "group_subtasks": {}, "configs": {}, "versions": {}, "n-shot": {}, "higher_is_better": {}, "n-samples": {},
        "config": {"model": model, "model_args": dict(model_args), "batch_size": "16", "limit": limit, "gen_kwargs": {}, "model_dtype": "torch.float32"},
    }  # fmt: skip
    for task, samples in tasks.items():
        names = [str(name) for name in samples[0]["metrics"]]
        results["results"][task] = {"alias": task}
        results["configs"][task] = {"task": task}
        results["versions"][task] = 1.0
        results["n-shot"][task] = (shots or {}).get(task, 0)
        results["higher_is_better"][task] = {name: "perplexity" not in name for name in names}
        results["n-samples"][task] = {"original": len(samples), "effective": len(samples)}
        with (inner / f"samples_{task}_{date}.jsonl").open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(_on_disk(sample), ensure_ascii=False) + "\n")
    (inner / f"results_{date}.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    return directory


def _on_disk(sample: Mapping[str, Any]) -> dict[str, Any]:
    """As the tracker stores it: arguments by name, answers and target as strings."""
    arguments = {f"gen_args_{i}": {f"arg_{j}": part for j, part in enumerate(request)} for i, request in enumerate(sample["arguments"])}
    return {
        **sample,
        "arguments": arguments,
        "resps": _strings(sample["resps"]),
        "filtered_resps": _strings(sample["filtered_resps"]),
        "target": str(sample["target"]),
    }


def _strings(value: Any) -> Any:
    return [_strings(part) for part in value] if isinstance(value, list | tuple) else str(value)
