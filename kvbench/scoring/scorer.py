"""Scores of all arms, computed once per distinct request and handed out arm by arm.

lm-eval evaluates one model at a time. The first arm that asks makes the engine answer for every arm; the others find
their answers here. So each context is prefilled once per model, however many arms there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from kvbench.errors import BadInputError
from kvbench.ranks import ALONE, Ranks
from kvbench.scoring.batching import Tokens
from kvbench.scoring.engine import Costs, TransferEngine
from kvbench.scoring.generation import GenerationSettings, Prompt, generate
from kvbench.scoring.journal import Journal
from kvbench.scoring.loglikelihood import PackedContext, Score, score_contexts

Progress = Callable[[int], None]
Bar = Callable[[str, int], AbstractContextManager[Progress]]
T = TypeVar("T")
K = TypeVar("K")
AUTO_BATCH = 32


@contextmanager
def tqdm_bar(description: str, total: int) -> Iterator[Progress]:
    """lm-eval's kind of progress bar."""
    with tqdm(total=total, desc=description, disable=total == 0) as bar:

        def step(n: int) -> None:
            bar.update(n)

        yield step


class SharedScorer:
    """Memoised scores and generations of an engine's arms.

    Args:
        engine: models and arms.
        batch_size: contexts per batch, or `auto`: as many as the token budget allows, halved when memory runs out.
        max_length: positions that every arm may use: the smaller of both models' limits.
        bar: makes a progress bar from a description and a number of contexts.
        journal: where answers are kept as they come, for resuming; with several processes, process 0 has it.
        ranks: processes that share the batches. All must ask the same in the same order; then all get the answers of a single process.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        batch_size: int | str,
        max_length: int,
        bar: Bar = tqdm_bar,
        journal: Journal | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.engine, self.max_length, self.bar, self.journal, self.ranks = engine, max_length, bar, journal, ranks
        self._auto = str(batch_size).startswith("auto")
        whole = str(batch_size).lstrip("-").isdigit()
        self._batch_size = AUTO_BATCH if self._auto else int(batch_size) if whole else 0
        if self._batch_size < 1:
            raise BadInputError(f"batch size = {batch_size}; it is a positive number or 'auto'")
        self.encoded: dict[tuple[str, bool | None, int | None], list[int]] = {}
        """Token ids by text, since every arm tokenises the same requests."""
        self._scores: dict[tuple[Tokens, Tokens], dict[str, Score]] = {}
        self._texts: dict[tuple[Tokens, GenerationSettings], dict[str, list[int]]] = {}

    def loglikelihoods(self, arm: str, requests: Sequence[tuple[Tokens, Tokens]]) -> list[Score]:
        """Score (context, continuation) pairs with one arm.

        Args:
            arm: its name.
            requests: token pairs; contexts that do not fit the position limit are cut on the left, and counted.
        """
        keys = [self._fitted(context, continuation) for context, continuation in requests]
        grouped: dict[Tokens, dict[Tokens, None]] = {}
        for key in keys:
            if key not in self._scores:
                grouped.setdefault(key[0], {})[key[1]] = None
        if grouped:
            self.engine.costs.truncated += sum(len(c) + len(t) > self.max_length + 1 for c, t in dict.fromkeys(requests))
            self._recall_scores(grouped)
            self._score(grouped)
        return [self._scores[key][arm] for key in keys]

    def _fitted(self, context: Tokens, continuation: Tokens) -> tuple[Tokens, Tokens]:
        """The pair as lm-eval's `hf` would feed it: the last token is never an input, so one more fits."""
        if len(continuation) > self.max_length:
            raise BadInputError(
                f"a continuation of {len(continuation)} tokens is longer than the position limit of {self.max_length}; shorten the task's continuation"
            )
        whole = (context + continuation)[-(self.max_length + 1) :]
        return whole[: len(whole) - len(continuation)], continuation

    def _recall_scores(self, grouped: dict[Tokens, dict[Tokens, None]]) -> None:
        """Take what an earlier, killed process of the same run has answered; drop it from the work."""
        wanted = [(context, continuation) for context, continuations in grouped.items() for continuation in continuations]
        for (context, continuation), stored in self._stored("score", {key: key for key in wanted}).items():
            self._scores[context, continuation] = {arm: Score(logprob, greedy) for arm, (logprob, greedy) in stored.items()}
            del grouped[context][continuation]
            if not grouped[context]:
                del grouped[context]

    def _stored(self, kind: str, wanted: Mapping[K, tuple[Any, ...]]) -> dict[K, dict[str, Any]]:
        """Answers of all arms in the journal, by what they answer."""
        arms, found = {arm.name for arm in self.engine.arms}, {}
        if self.journal is not None:
            for key, parts in wanted.items():
                stored = self.journal.get(Journal.key(kind, *parts))
                if stored is not None and stored.keys() >= arms:
                    found[key] = stored
        return self.ranks.broadcast(found)

    def _score(self, grouped: dict[Tokens, dict[Tokens, None]]) -> None:
        if not grouped:
            return
        contexts = [PackedContext(*self._split(context), tuple(continuations)) for context, continuations in grouped.items()]
        whole = list(grouped)
        with self.bar("scoring contexts", len(contexts)) as step:

            def keep(members: Sequence[int], results: dict[str, list[list[Score]]]) -> None:
                entries = []
                for index in members:
                    for position, continuation in enumerate(contexts[index].continuations):
                        answers = {arm: rows[index][position] for arm, rows in results.items()}
                        self._scores[whole[index], continuation] = answers
                        entries.append((Journal.key("score", whole[index], continuation), answers))
                if self.journal is not None:
                    self.journal.put(entries)
                step(len(members))

            with self._all_costs():
                self._with_memory(lambda size: score_contexts(self.engine, contexts, batch_size=size, finished=keep, ranks=self.ranks))

    def generations(self, arm: str, requests: Sequence[tuple[Tokens, GenerationSettings]]) -> list[list[int]]:
        """Continue contexts with one arm; contexts are cut on the left so that the longest generation still fits, and counted."""
        keys = []
        for context, settings in requests:
            room = self.max_length - settings.max_new_tokens
            if room < 1:
                raise BadInputError(
                    f"max_gen_toks = {settings.max_new_tokens} leaves no room for a context within the position limit of {self.max_length}; lower it"
                )
            keys.append((context[-room:], settings))
        for settings in dict.fromkeys(s for _, s in keys):
            missing = list(dict.fromkeys(c for c, s in keys if s == settings and (c, s) not in self._texts))
            if missing:
                room = self.max_length - settings.max_new_tokens
                self.engine.costs.truncated += sum(len(c) > room for c, s in dict.fromkeys(requests) if s == settings)
                self._recall_texts(missing, settings)
                self._generate(missing, settings)
        return [self._texts[key][arm] for key in keys]

    def _recall_texts(self, missing: list[Tokens], settings: GenerationSettings) -> None:
        stored = self._stored("text", {context: (context, astuple(settings)) for context in missing})
        for context, answers in stored.items():
            self._texts[context, settings] = answers
        missing[:] = [context for context in missing if context not in stored]

    def _generate(self, missing: list[Tokens], settings: GenerationSettings) -> None:
        if not missing:
            return
        prompts = [Prompt(*self._split(context)) for context in missing]
        with self.bar("generating", len(prompts)) as step:

            def keep(members: Sequence[int], results: dict[str, list[list[int]]]) -> None:
                entries = []
                for index in members:
                    answers = {arm: rows[index] for arm, rows in results.items()}
                    self._texts[missing[index], settings] = answers
                    entries.append((Journal.key("text", missing[index], astuple(settings)), answers))
                if self.journal is not None:
                    self.journal.put(entries)
                step(len(members))

            with self._all_costs():
                self._with_memory(lambda size: generate(self.engine, prompts, settings, batch_size=size, finished=keep, ranks=self.ranks))

    def _split(self, context: Tokens) -> tuple[Tokens, Tokens]:
        """Prefix and held-back tokens; counts contexts with nothing to transfer."""
        cut = max(0, len(context) - self.engine.hold_back)
        self.engine.costs.contexts += 1
        self.engine.costs.too_short += cut == 0
        return context[:cut], context[cut:]

    @contextmanager
    def _all_costs(self) -> Iterator[None]:
        """Count what all processes did."""
        before = self.engine.costs
        mine = self.engine.costs = Costs()
        try:
            yield
        finally:
            self.engine.costs = before
            before.add(mine)
        for rank, costs in enumerate(self.ranks.gather(mine)):
            if rank != self.ranks.rank:
                before.add(costs)

    def _with_memory(self, work: Callable[[int], T]) -> T:
        while True:
            try:
                return work(self._batch_size)
            except torch.OutOfMemoryError as error:
                if not self._auto or self._batch_size == 1:
                    raise BadInputError(
                        f"the device ran out of memory at batch size {self._batch_size}; use a smaller --batch_size, or 'auto'"
                    ) from error
                self._batch_size //= 2
                torch.cuda.empty_cache()
