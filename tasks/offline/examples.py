"""Few-shot examples where the local data has none."""

from __future__ import annotations

from lm_eval.api.samplers import ContextSampler

from kvbench.errors import BadInputError


class NoExamples(ContextSampler):  # type: ignore[misc]
    """Refuses to draw: without it, lm-eval takes the few-shot examples from the very items it evaluates."""

    def sample(self, n: int, *_args: object, **_kwargs: object) -> list[dict[str, object]]:
        """Nothing, if nothing is asked for.

        Raises:
            BadInputError: examples are asked for.
        """
        if n:
            raise BadInputError(
                f"{n} few-shot examples are asked for, but the local data of this task has no split to take them from; run it 0-shot, or add the file that 'kvbench tasks export' names as missing"
            )
        return []
