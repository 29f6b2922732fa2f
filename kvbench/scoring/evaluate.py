"""Many arms through lm-eval in one pass over the items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.errors import BadInputError
from kvbench.scoring.arms import Arm
from kvbench.scoring.lm import KVTransferLM
from kvbench.scoring.scorer import SharedScorer
from kvbench.scoring.taskfiles import find_definitions

Results = dict[str, Any]


def task_manager(tasks: Sequence[str], include: Sequence[Path] = (), metadata: Mapping[str, Any] | None = None) -> Any:
    """lm-eval's task manager with kvbench's own tasks, the user's folders, and the stock folders that the names need.

    lm-eval's index of all its stock tasks takes many seconds to build, so only what is named is looked up.

    Raises:
        BadInputError: a folder that does not exist, no task, or an unknown one.
    """
    from lm_eval.tasks import TaskManager

    for path in include:
        if not path.is_dir():
            raise BadInputError(f"task folder '{path}' does not exist")
    if not tasks:
        raise BadInputError("no task given; name one or more with --tasks")
    found = find_definitions(list(tasks), include)
    return TaskManager(include_path=[str(path) for path in found.folders], include_defaults=False, metadata=dict(metadata or {}))


@cache
def _environment() -> dict[str, Any]:
    """What lm-eval records of the machine. It runs `pip list` and other programs for that, a second or two each time; no arm changes it."""
    from lm_eval.loggers.utils import add_env_info

    found: dict[str, Any] = {}
    add_env_info(found)
    return found


@contextmanager
def _surroundings_once() -> Iterator[None]:
    """What lm-eval would ask of the machine again for every arm is asked once in a process.

    It also asks git for a commit in the working directory, which complains on the terminal where that is no repository: a run's
    provenance records kvbench's own commit, and lm-eval's field stays empty.
    """
    from lm_eval import evaluator

    asked = evaluator.get_git_commit_hash, evaluator.add_env_info
    evaluator.get_git_commit_hash, evaluator.add_env_info = lambda: None, lambda results: results.update(_environment())
    try:
        yield
    finally:
        evaluator.get_git_commit_hash, evaluator.add_env_info = asked


def evaluate_arms(
    scorer: SharedScorer,
    tasks: Sequence[str],
    *,
    manager: Any | None = None,
    limit: int | float | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool | str = False,
    fewshot_as_multiturn: bool = False,
    gen_kwargs: str | None = None,
    bootstrap_iters: int = 0,
    seed: int = 1234,
    on_arm: Callable[[Arm], None] | None = None,
    trackers: Mapping[str, Any] | None = None,
) -> dict[str, Results]:
    """Evaluate every arm of a scorer with lm-eval; the first arm's requests are scored for all arms at once.

    lm-eval's own evaluation runs once per arm from the stored scores, so metrics, filters and aggregation are lm-eval's.

    Args:
        scorer: models and arms.
        tasks: lm-eval task or group names.
        manager: lm-eval task manager; default: stock tasks and kvbench's own.
        limit: first items of each task only (below 1: a share).
        num_fewshot: overrides the tasks' own.
        apply_chat_template: as lm-eval's.
        fewshot_as_multiturn: as lm-eval's.
        gen_kwargs: as lm-eval's.
        bootstrap_iters: of lm-eval's own standard errors (off: kvbench computes paired ones).
        seed: few-shot sampling seed.
        on_arm: called before each arm.
        trackers: lm-eval's evaluation tracker per arm, where its native files are wanted.

    Returns:
        Arm name -> lm-eval's results with samples.

    Raises:
        BadInputError: an unknown task, or a task's data that cannot be loaded.
    """
    import lm_eval

    names = list(dict.fromkeys(tasks))
    manager = manager or task_manager(names)
    results = {}
    for arm in scorer.engine.arms:
        if on_arm:
            on_arm(arm)
        lm = KVTransferLM.from_scorer(scorer, arm)
        with _surroundings_once():
            results[arm.name] = lm_eval.simple_evaluate(
                model=lm,
                tasks=names,
                task_manager=manager,
                limit=limit,
                num_fewshot=num_fewshot,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=fewshot_as_multiturn,
                gen_kwargs=gen_kwargs,
                bootstrap_iters=bootstrap_iters,
                fewshot_random_seed=seed,
                log_samples=True,
                evaluation_tracker=trackers[arm.name] if trackers else None,
            )
    return results
