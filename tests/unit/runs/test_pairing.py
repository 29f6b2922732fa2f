from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval_samples import choice_samples, sum_samples, write_lm_eval_folder

from kvbench.errors import BadInputError
from kvbench.runs import load_runs, pair

Samples = dict[str, list[dict[str, Any]]]


def both(tmp_path: Path, first: Samples, second: Samples, **settings: Any) -> list[Any]:
    """Two lm-eval folders, settings applying to the second."""
    write_lm_eval_folder(tmp_path / "a", first)
    write_lm_eval_folder(tmp_path / "b", second, **settings)
    return [*load_runs(tmp_path / "a"), *load_runs(tmp_path / "b")]


def test_items_are_joined_on_task_filter_and_document(tmp_path: Path) -> None:
    # The second run has its items in another order, as several ranks give them.
    first = {"c": choice_samples("c", 6, 0.5, "a"), "s": sum_samples("s", 4, 0.5, "a")}
    second = {"c": choice_samples("c", 6, 0.5, "b")[::-1], "s": sum_samples("s", 4, 0.5, "b")}
    paired = pair(both(tmp_path, first, second))
    assert [(items.task, items.filter, items.doc_ids) for items in paired] == [
        ("c", "none", [0, 1, 2, 3, 4, 5]),
        ("s", "strict-match", [0, 1, 2, 3]),
        ("s", "flexible-extract", [0, 1, 2, 3]),
    ]
    assert list(paired[0].frames["b"]["metric.acc"]) == [sample["acc"] for sample in choice_samples("c", 6, 0.5, "b")]
    assert paired[0].metrics == ["acc", "acc_norm"]


def test_a_limit_on_one_side_is_refused(tmp_path: Path) -> None:
    runs = both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": choice_samples("c", 3, 0.5, "b")}, limit=3)
    with pytest.raises(BadInputError, match=r"--limit is none for arm 'a' \(6 rows\) and 3.0 for arm 'b' \(3 rows\)"):
        pair(runs)


def test_other_items_are_refused_with_examples(tmp_path: Path) -> None:
    runs = both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": choice_samples("c", 8, 0.5, "b")[2:]})
    with pytest.raises(BadInputError, match=r"arm 'b' lacks 2 of the 6 items of arm 'a' \(doc_id 0, 1\).*refused"):
        pair(runs)


def test_another_few_shot_count_is_refused_by_its_number(tmp_path: Path) -> None:
    runs = both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": choice_samples("c", 6, 0.5, "b", shots=2)}, shots={"c": 2})
    with pytest.raises(BadInputError, match=r"number of few-shot examples is 0 for arm 'a'.*and 2 for arm 'b'"):
        pair(runs)


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    runs = both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": choice_samples("c", 6, 0.5, "b", shots=2)})
    with pytest.raises(BadInputError, match=r"were given other prompts on 6 of 6 items \(doc_id 0, 1, 2, \.\.\.; prompt_hash\)"):
        pair(runs)


@pytest.mark.parametrize(("column", "what"), [("doc_hash", "other documents"), ("target_hash", "other gold answers")])
def test_other_documents_and_gold_answers_are_refused(tmp_path: Path, column: str, what: str) -> None:
    second = choice_samples("c", 6, 0.5, "b")
    second[4][column] = "0" * 64
    with pytest.raises(BadInputError, match=rf"{what} on 1 of 6 items \(doc_id 4; {column}\)"):
        pair(both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": second}))


def test_other_choices_are_refused(tmp_path: Path) -> None:
    second = choice_samples("c", 6, 0.5, "b")
    second[1]["arguments"][2] = (second[1]["arguments"][2][0], " unicorn")
    with pytest.raises(BadInputError, match="other continuations or generation arguments on 1 of 6"):
        pair(both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": second}))


def test_a_doubled_item_is_refused(tmp_path: Path) -> None:
    second = choice_samples("c", 6, 0.5, "b")
    with pytest.raises(BadInputError, match="item 5 comes twice"):
        pair(both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": [*second, second[5]]}))


def test_a_task_that_one_arm_lacks_is_refused_unless_left_out(tmp_path: Path) -> None:
    first = {"c": choice_samples("c", 6, 0.5, "a"), "d": choice_samples("d", 6, 0.5, "a")}
    runs = both(tmp_path, first, {"c": choice_samples("c", 6, 0.5, "b")})
    with pytest.raises(BadInputError, match=r"arm 'b' has no samples of task 'd'.*--tasks or --arms"):
        pair(runs)
    assert [items.task for items in pair(runs, tasks=["c"])] == ["c"]


def test_other_filters_are_refused(tmp_path: Path) -> None:
    first, second = sum_samples("s", 4, 0.5, "a"), sum_samples("s", 4, 0.5, "b")[:4]
    with pytest.raises(BadInputError, match="has the filters strict-match, flexible-extract, arm 'b' has strict-match"):
        pair(both(tmp_path, {"s": first}, {"s": second}))


def test_one_arm_or_an_unknown_name_is_refused(tmp_path: Path) -> None:
    runs = both(tmp_path, {"c": choice_samples("c", 6, 0.5, "a")}, {"c": choice_samples("c", 6, 0.5, "b")})
    with pytest.raises(BadInputError, match=r"only one arm \(a\)"):
        pair(runs[:1])
    with pytest.raises(BadInputError, match="there is no task 'x' in these runs; there are c"):
        pair(runs, tasks=["x"])
    with pytest.raises(BadInputError, match="there is no arm 'x' in these runs; there are a, b"):
        pair(runs, arms=["x"])
