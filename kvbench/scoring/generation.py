"""Generation behind a transferred prefix, with an own decode loop.

transformers' `generate` infers positions and masks from the cache it is given and is silently wrong for a foreign one, so
positions and masks are explicit here. Greedy by default; temperature, top-k, top-p and repetition penalty through
transformers' own logits processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import MinPLogitsWarper

from kvbench.errors import BadInputError
from kvbench.pairs.models import LoadedModel, Query
from kvbench.ranks import ALONE, Ranks
from kvbench.scoring.batching import Batch, Tokens, plan_batches
from kvbench.scoring.engine import FilledPrefixes, TransferEngine
from kvbench.scoring.loglikelihood import TOKEN_BUDGET, shuffled_prefixes

ROOM = 64
SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Accepted because they change nothing here: a single greedy or sampled beam with a cache.
NEUTRAL: dict[str, Any] = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1}


@dataclass(frozen=True)
class GenerationSettings:
    """How to generate.

    Attributes:
        max_new_tokens: tokens at most.
        stop: strings that end a generation.
        do_sample: sample instead of the most likely token.
        temperature: of sampling.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set with this probability.
        min_p: drop tokens below this share of the most likely one's probability.
        repetition_penalty: 1 is none.
        seed: of sampling; every arm starts from the same.
    """

    max_new_tokens: int
    stop: tuple[str, ...]
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 1234

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any], max_new_tokens: int, stop: Sequence[str]) -> GenerationSettings:
        """From lm-eval's generation arguments, as `hf` reads them: temperature 0 or none means greedy.

        Raises:
            BadInputError: an argument that this decode loop does not have.
        """
        values: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in SETTINGS:
                values[name] = value
            elif name not in NEUTRAL or NEUTRAL[name] != value:
                raise BadInputError(
                    f"generation argument {name}={value!r} is not supported by kvxfer; it takes until, max_gen_toks, {', '.join(SETTINGS)}"
                )
        for name, value in values.items():
            if name != "do_sample" and (isinstance(value, bool) or not isinstance(value, int | float | None)):
                raise BadInputError(f"generation argument {name}={value!r} is not a number")
        temperature = float(values.pop("temperature", 0.0) or 0.0)
        sample = values.pop("do_sample", None)
        sample = temperature > 0 if sample is None else bool(sample)
        return cls(max_new_tokens, tuple(stop), do_sample=sample, temperature=temperature if temperature > 0 else 1.0, **values)

    def processors(self) -> LogitsProcessorList:
        """Transformers' logits processors, in its order."""
        out = LogitsProcessorList()
        if self.repetition_penalty != 1.0:
            out.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.do_sample:
            if self.temperature != 1.0:
                out.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                out.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1.0:
                out.append(TopPLogitsWarper(self.top_p))
            if self.min_p > 0:
                out.append(MinPLogitsWarper(self.min_p))
        return out


@dataclass(frozen=True)
class Prompt:
    """A context to continue.

    Attributes:
        prefix: tokens whose cache is transferred.
        held: tokens that the answering model runs itself.
    """

    prefix: Tokens
    held: Tokens


def generate(
    engine: TransferEngine,
    prompts: Sequence[Prompt],
    settings: GenerationSettings,
    *,
    batch_size: int,
    finished: Callable[[Sequence[int], dict[str, list[list[int]]]], None] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, list[list[int]]]:
    """Continue every prompt with every arm.

    Args:
        engine: models and arms.
        prompts: what to continue.
        settings: how.
        batch_size: prompts per batch at most.
        finished: called after each batch with the indices of its prompts and the results so far.
        ranks: processes that share the batches; the batches are those of a single process.

    Returns:
        Arm name -> generated token ids per prompt, end-of-sequence token removed.
    """
    results: dict[str, list[list[int]]] = {arm.name: [[] for _ in prompts] for arm in engine.arms}
    # Rows decode in step, so a batch holds prompts with equally many held-back tokens (they differ only for contexts shorter than hold_back).
    for held in sorted({len(p.held) for p in prompts}):
        chosen = [i for i, p in enumerate(prompts) if len(p.held) == held]
        prefixes = [prompts[i].prefix for i in chosen]
        shuffled = shuffled_prefixes(prefixes)
        batches = plan_batches(
            prefixes,
            [held + settings.max_new_tokens] * len(prefixes),
            batch_size=batch_size,
            token_budget=TOKEN_BUDGET,
            arms=max(len(arms) for _, arms in engine.answering()),
            share_headers=engine.share_headers,
        )

        def answer(batch: Batch, chosen: list[int] = chosen, shuffled: list[Tokens] = shuffled, held: int = held) -> dict[str, list[list[int]]]:
            members = [prompts[chosen[i]] for i in batch.members]
            found: dict[str, list[list[int]]] = {}
            stacks = engine.fill(
                batch.header, [p.prefix for p in members], [shuffled[i] for i in batch.members], room=held + min(ROOM, settings.max_new_tokens)
            )
            for (model, arms), filled in zip(engine.answering(), stacks, strict=True):
                tokens = decode(model, filled, members, settings)
                for a, arm in enumerate(arms):
                    found[arm.name] = tokens[a * len(members) : (a + 1) * len(members)]
                engine.costs.generated += sum(map(len, tokens))
                engine.costs.answered += len(tokens) * held
            return found

        for batch, found in ranks.share(batches, answer):
            indices = [chosen[i] for i in batch.members]
            for arm, rows in found.items():
                for index, tokens in zip(indices, rows, strict=True):
                    results[arm][index] = tokens
            if finished:
                finished(indices, results)
    return results


def end_ids(model: LoadedModel) -> set[int]:
    """Ids that end a generation: the tokenizer's and those of the generation configuration."""
    configured = getattr(model.model.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {model.tokenizer.eos_token_id}
    return {int(i) for i in ids if i is not None}


@torch.no_grad()
def decode(model: LoadedModel, filled: FilledPrefixes, members: Sequence[Prompt], settings: GenerationSettings) -> list[list[int]]:
    """Decode all rows of a stack in step; rows that have ended leave the batch once they are half of it.

    Returns:
        Token ids per row, arm by arm, end-of-sequence token removed.
    """
    copies, device = len(filled.arms), model.device
    starts = torch.tensor([len(p.prefix) for p in members] * copies, device=device)
    ids = torch.tensor([p.held for p in members] * copies, device=device)
    positions = starts[:, None] + torch.arange(ids.shape[1], device=device)
    context = [list(p.prefix + p.held) for p in members] * copies
    processors, ends = settings.processors(), end_ids(model)
    # Rows of different arms draw with the same numbers: the comparison stays paired under sampling.
    generators = [torch.Generator(device="cpu").manual_seed(settings.seed + m) for _ in range(copies) for m in range(len(members))]
    behind, lengths = positions[:, :0], filled.lengths
    generated: list[list[int]] = [[] for _ in context]
    active, ended = list(range(len(context))), set[int]()
    for _ in range(settings.max_new_tokens):
        hidden = model.run(filled.cache, Query(ids, positions, torch.zeros_like(ids)), filled.header, lengths, filled.padded, behind)
        behind = torch.cat([behind, positions], dim=1)
        logits = _chunked_logits(model, hidden[:, -1]).to(device)
        following = _choose(logits, processors, settings, [context[r] + generated[r] for r in active], [generators[r] for r in active])
        going = []
        for place, (row, token) in enumerate(zip(active, following.tolist(), strict=True)):
            if row in ended or token in ends:
                ended.add(row)
                continue
            generated[row].append(token)
            if _stopped(model, generated[row], settings.stop):
                ended.add(row)
            else:
                going.append(place)
        if not going:
            break
        ids, positions = following[:, None], positions[:, -1:] + 1
        if len(going) <= len(active) // 2:
            kept = torch.tensor(going, device=device)
            filled.cache.select(kept)
            ids, positions, behind, lengths = ids[kept], positions[kept], behind[kept], lengths[kept]
            active = [active[place] for place in going]
    return generated


def _chunked_logits(model: LoadedModel, hidden: Tensor) -> Tensor:
    chunk = model.logit_chunk()
    return torch.cat([model.logits(hidden[i : i + chunk]) for i in range(0, hidden.shape[0], chunk)])


def _choose(
    logits: Tensor,
    processors: LogitsProcessorList,
    settings: GenerationSettings,
    tokens: list[list[int]],
    generators: list[torch.Generator],
) -> Tensor:
    """The next token of each row, from its logits and all tokens before."""
    if len(processors):
        rows = [processors(torch.tensor([before], device=logits.device), logits[i : i + 1]) for i, before in enumerate(tokens)]
        logits = torch.cat(rows)
    if not settings.do_sample:
        return logits.argmax(-1)
    probabilities = logits.softmax(-1).cpu()
    drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)


def _stopped(model: LoadedModel, tokens: list[int], stop: Sequence[str]) -> bool:
    """Whether a stop string ends here; it cannot span more tokens than it has characters."""
    if not stop:
        return False
    reach = max(len(s.encode()) for s in stop) + 1
    text = model.tokenizer.decode(tokens[-reach:])
    return any(s and s in text for s in stop)
