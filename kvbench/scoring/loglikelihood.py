"""Log-likelihoods of many continuations behind many prefixes, for all arms at once.

All continuations of a context lie packed in one row: the held-back tokens run once, each continuation sees the prefix, the
held-back tokens and itself, never another continuation. The language-model head runs only where a logit is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.pairs.models import LoadedModel, Query
from kvbench.ranks import ALONE, Ranks
from kvbench.scoring.batching import Batch, Tokens, cut, plan_batches
from kvbench.scoring.engine import FilledPrefixes, TransferEngine

TOKEN_BUDGET = 1 << 16
# Contexts are prefilled in batches of like prefix length and answered in batches of like query length; this many prefill batches
# are gathered before they are regrouped.
PREFILLS_PER_BATCH = 4


class Score(NamedTuple):
    """What lm-eval expects for one continuation.

    Attributes:
        logprob: sum of the log-probabilities of the continuation's tokens, nats.
        greedy: whether each token is the model's most likely one.
    """

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class PackedContext:
    """A context with all its continuations.

    Attributes:
        prefix: tokens whose cache is transferred.
        held: tokens that the answering model runs itself.
        continuations: each at least one token.
    """

    prefix: Tokens
    held: Tokens
    continuations: tuple[Tokens, ...]

    @property
    def query_tokens(self) -> int:
        """Tokens run behind the prefix: the held-back ones once, each continuation without its last."""
        return len(self.held) + sum(len(c) - 1 for c in self.continuations)


def score_contexts(
    engine: TransferEngine,
    contexts: Sequence[PackedContext],
    *,
    batch_size: int,
    finished: Callable[[Sequence[int], dict[str, list[list[Score]]]], None] | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, list[list[Score]]]:
    """Score every continuation of every context with every arm.

    Args:
        engine: models and arms.
        contexts: what to score.
        batch_size: contexts per batch at most.
        finished: called after each batch with the indices of its contexts and the results so far.
        ranks: processes that share the batches; the batches are those of a single process.

    Returns:
        Arm name -> for each context the scores of its continuations.
    """
    results: dict[str, list[list[Score]]] = {arm.name: [[] for _ in contexts] for arm in engine.arms}
    prefixes = [c.prefix for c in contexts]
    widest_arms = max(len(arms) for _, arms in engine.answering())
    batches = plan_batches(
        prefixes,
        [0] * len(contexts),
        batch_size=batch_size * PREFILLS_PER_BATCH,
        token_budget=TOKEN_BUDGET,
        arms=widest_arms,
        share_headers=engine.share_headers,
    )
    shuffled = shuffled_prefixes(prefixes)

    def score(batch: Batch) -> dict[str, list[list[Score]]]:
        members = [contexts[i] for i in batch.members]
        found: dict[str, list[list[Score]]] = {arm.name: [[] for _ in members] for arm in engine.arms}
        stacks = engine.fill(batch.header, [c.prefix for c in members], [shuffled[i] for i in batch.members], at_once=batch_size)
        for (model, arms), filled in zip(engine.answering(), stacks, strict=True):
            for places in _by_query_length(members, batch_size, len(arms)):
                chosen = [members[place] for place in places]
                rows = [a * len(members) + place for a in range(len(arms)) for place in places]
                scores = _score_stack(model, filled.take(rows, max(c.query_tokens for c in chosen)), chosen)
                for a, arm in enumerate(arms):
                    for k, place in enumerate(places):
                        found[arm.name][place] = scores[a * len(chosen) + k]
                engine.costs.answered += len(arms) * sum(c.query_tokens for c in chosen)
        return found

    for batch, found in ranks.share(batches, score):
        for arm, rows in found.items():
            for index, scores in zip(batch.members, rows, strict=True):
                results[arm][index] = scores
        if finished:
            finished(batch.members, results)
    return results


def _by_query_length(members: Sequence[PackedContext], batch_size: int, arms: int) -> list[list[int]]:
    """Cut contexts into batches of like query length: their tokens go through every linear layer once per arm, padding included."""
    order = sorted(range(len(members)), key=lambda i: -members[i].query_tokens)
    most = max(1, min(batch_size, TOKEN_BUDGET // (arms * members[order[0]].query_tokens)))
    out: list[list[int]] = []
    for size in cut([members[i].query_tokens for i in order], most, arms):
        out.append(order[:size])
        order = order[size:]
    return out


def shuffled_prefixes(prefixes: Sequence[Tokens]) -> list[Tokens]:
    """For each prefix the next distinct one in order, repeated or cut to its length (the control `shuffled`)."""
    out: list[Tokens] = []
    for i, prefix in enumerate(prefixes):
        others = (prefixes[(i + step) % len(prefixes)] for step in range(1, len(prefixes)))
        other = next((o for o in others if o and o[: len(prefix)] != prefix[: len(o)]), tuple(reversed(prefix)))
        repeats = -(-len(prefix) // max(1, len(other)))
        out.append((other * repeats)[: len(prefix)])
    return out


def packed_query(members: Sequence[PackedContext], copies: int, device: torch.device) -> Query:
    """Ids, positions and segments of the rows, `[copies * len(members), widest]`."""
    width = max(c.query_tokens for c in members)
    ids = torch.zeros(len(members), width, dtype=torch.long)
    positions = torch.zeros(len(members), width, dtype=torch.long)
    segments = torch.full((len(members), width), -1, dtype=torch.long)
    for row, context in enumerate(members):
        start = len(context.prefix)
        tokens, where, segment = list(context.held), list(range(start, start + len(context.held))), [0] * len(context.held)
        for number, continuation in enumerate(context.continuations, 1):
            fed = continuation[:-1]
            tokens.extend(fed)
            where.extend(range(start + len(context.held), start + len(context.held) + len(fed)))
            segment.extend([number] * len(fed))
        ids[row, : len(tokens)] = torch.tensor(tokens)
        positions[row, : len(tokens)] = torch.tensor(where)
        segments[row, : len(tokens)] = torch.tensor(segment)
    return Query(ids.repeat(copies, 1).to(device), positions.repeat(copies, 1).to(device), segments.repeat(copies, 1).to(device))


@torch.no_grad()
def _score_stack(model: LoadedModel, filled: FilledPrefixes, members: Sequence[PackedContext]) -> list[list[Score]]:
    copies = len(filled.arms)
    query = packed_query(members, copies, model.device)
    hidden = model.run(filled.cache, query, filled.header, filled.lengths, filled.padded)
    # One entry per scored token: (row, query index whose hidden state predicts it, the token).
    rows: list[int] = []
    columns: list[int] = []
    wanted: list[int] = []
    counts: list[int] = []
    for copy in range(copies):
        for m, context in enumerate(members):
            row, at = copy * len(members) + m, len(context.held)
            for continuation in context.continuations:
                sources = [len(context.held) - 1, *range(at, at + len(continuation) - 1)]
                at += len(continuation) - 1
                rows.extend([row] * len(continuation))
                columns.extend(sources)
                wanted.extend(continuation)
                counts.append(len(continuation))
    picked = torch.tensor([rows, columns], device=hidden.device)
    # Tokens that several continuations ask of the same hidden state (always the first one) share one head row.
    places, inverse = torch.unique(picked, dim=1, return_inverse=True)
    logprobs, greedy = token_scores(model, hidden[places[0], places[1]], inverse, torch.tensor(wanted, device=hidden.device))
    out: list[list[Score]] = [[] for _ in range(copies * len(members))]
    lp, ok = logprobs.double().cpu(), greedy.cpu()
    start, group = 0, iter(counts)
    for copy in range(copies):
        for m, context in enumerate(members):
            for _ in context.continuations:
                stop = start + next(group)
                out[copy * len(members) + m].append(Score(float(lp[start:stop].sum()), bool(ok[start:stop].all())))
                start = stop
    return out


def token_scores(model: LoadedModel, hidden: Tensor, which: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and greedy agreement of tokens.

    Args:
        model: whose head to use.
        hidden: `[states, hidden]`.
        which: `[n]` index into `hidden` for each token.
        wanted: `[n]` token ids.

    Returns:
        `[n]` float32 log-probabilities and `[n]` booleans.
    """
    order = which.argsort(stable=True)
    which, wanted = which[order], wanted[order]
    logprobs, greedy = torch.empty(len(wanted), device=hidden.device), torch.empty(len(wanted), dtype=torch.bool, device=hidden.device)
    chunk = model.logit_chunk()
    for start in range(0, hidden.shape[0], chunk):
        logits = model.logits(hidden[start : start + chunk])
        low, high = (int(torch.searchsorted(which, edge)) for edge in (start, start + logits.shape[0]))
        local, tokens = which[low:high] - start, wanted[low:high].to(logits.device)
        normaliser = logits.logsumexp(-1)
        logprobs[order[low:high]] = (logits[local, tokens] - normaliser[local]).to(logprobs.device)
        greedy[order[low:high]] = (logits.argmax(-1)[local] == tokens).to(greedy.device)
    return logprobs, greedy
