from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval_samples import choice_samples, f1_samples, prefix_samples, write_lm_eval_folder
from made_runs import make_run, task_samples
from scipy import stats as scipy_stats

from kvbench.errors import BadInputError
from kvbench.reporting import Comparison, Policy, compare
from kvbench.reporting.rows import average_line, headline, matrix
from kvbench.runs import load_runs

QUICK = Policy(resamples=1_000)


@pytest.fixture(scope="module")
def full(full_run: Path) -> Comparison:
    return compare(load_runs(full_run), QUICK).comparison


def folders(tmp_path: Path, *tasks: dict[str, list[dict[str, Any]]], names: tuple[str, ...] = ("big", "small", "third")) -> list[Any]:
    return [run for name, made in zip(names, tasks, strict=False) for run in load_runs(write_lm_eval_folder(tmp_path / name, made))]


def test_two_plain_lm_eval_folders_give_a_paired_comparison(tmp_path: Path) -> None:
    big, small = choice_samples("c", 200, 0.8, "big"), choice_samples("c", 200, 0.6, "small")
    found = compare(folders(tmp_path, {"c": big}, {"c": small})).comparison
    pair = found.pair("c|none|acc_norm", "small", "big")
    assert pair is not None
    # Counted item by item, and the test from scipy's own binomial law.
    won = sum(s["acc"] > b["acc"] for s, b in zip(small, big, strict=True))
    lost = sum(s["acc"] < b["acc"] for s, b in zip(small, big, strict=True))
    assert (pair.won, pair.lost, pair.tied) == (won, lost, 200 - won - lost)
    assert pair.p == pytest.approx(2 * scipy_stats.binom.cdf(min(won, lost), won + lost, 0.5))
    accuracy = {name: sum(s["acc"] for s in made) / 200 for name, made in (("big", big), ("small", small))}
    assert pair.difference.value == pytest.approx(accuracy["small"] - accuracy["big"])
    assert pair.retention.value == pytest.approx(accuracy["small"] / accuracy["big"])
    assert pair.floor_normalised.value == pytest.approx((accuracy["small"] - 0.25) / (accuracy["big"] - 0.25))
    assert pair.disposition == "degraded"
    assert found.reference_arm == "big"
    assert [v.reading for v in found.verdicts] == ["degraded"]


def test_the_reference_can_be_chosen_and_differences_change_sign(tmp_path: Path) -> None:
    runs = folders(tmp_path, {"c": choice_samples("c", 100, 0.8, "big")}, {"c": choice_samples("c", 100, 0.6, "small")})
    forward, backward = compare(runs, QUICK).comparison, compare(runs, QUICK, reference="small").comparison
    a, b = forward.pair("c|none|acc_norm", "small", "big"), backward.pair("c|none|acc_norm", "big", "small")
    assert a is not None
    assert b is not None
    assert a.difference.value == -b.difference.value  # type: ignore[operator]
    assert (a.won, a.lost, a.p) == (b.lost, b.won, b.p)
    assert a.difference.lower == pytest.approx(-b.difference.upper)  # type: ignore[operator]
    with pytest.raises(BadInputError, match="there is no arm 'x'"):
        compare(runs, reference="x")


def test_every_mapper_meets_target_source_zero_and_every_other_mapper(full: Comparison) -> None:
    found = {(p.arm, p.reference, p.relation) for p in full.pairs if p.task_id == "arc_made|none|acc_norm"}
    assert found == {
        ("ridge", "target", "target"), ("ridge", "source", "source"), ("ridge", "zero", "zero"), ("ridge", "head_local", "mapper"),
        ("head_local", "target", "target"), ("head_local", "source", "source"), ("head_local", "zero", "zero"),
        ("source", "target", "context"), ("zero", "target", "context"), ("raw", "target", "context"),
    }  # fmt: skip
    assert [arm.name for arm in full.arms] == ["target", "source", "ridge", "head_local", "zero", "raw"]


def test_the_family_is_adjusted_by_holm(full: Comparison) -> None:
    # Per headline task: 2 mappers x (target, source, zero), mapper against mapper, source against target. Six tasks.
    family = [pair for pair in full.pairs if pair.in_family]
    assert full.family == len(family) == 6 * 8
    p = sorted(pair.p for pair in family if pair.p is not None)
    slow: dict[float, float] = {}
    highest = 0.0
    for rank, value in enumerate(p):
        highest = max(highest, min((len(p) - rank) * value, 1.0))
        slow[value] = max(slow.get(value, 0.0), highest)
    for pair in family:
        assert pair.p is not None
        assert pair.p_holm == pytest.approx(slow[pair.p])
        assert pair.p_bh is not None
        assert pair.p <= pair.p_bh <= pair.p_holm + 1e-12
    assert all(pair.p_holm is None for pair in full.pairs if not pair.in_family)


def test_chance_kind_and_clusters_of_each_task(full: Comparison) -> None:
    read = {task.task: (task.kind, task.chance, task.cluster, task.clusters, task.n) for task in full.primary_tasks}
    assert read == {
        "mmlu_made": ("accuracy", 0.25, "task", 12, 360),
        "arc_made": ("accuracy", 0.25, None, None, 300),
        "wino_made": ("accuracy", 0.5, None, None, 200),
        "sums_made": ("accuracy", 0.0, None, None, 150),
        "wiki_made": ("nll", None, None, None, 60),
        "turns_made": ("score", 0.0, "conversation", 20, 80),
    }
    assert not full.task("sums_made|flexible-extract|exact_match").primary
    assert not full.task("mmlu_0|none|acc_norm").primary
    assert full.score("arc_made|none|acc_norm", "zero").at_chance
    assert not full.score("arc_made|none|acc_norm", "target").at_chance


def test_perplexity_figures_against_a_slow_computation(full: Comparison) -> None:
    nats = {arm: [s["token_perplexity"] for s in task_samples(arm)["wiki_made"]] for arm in ("ridge", "target")}
    tokens = sum(size for _, size in nats["target"])
    mean = {arm: -sum(loglikelihood for loglikelihood, _ in pairs) / tokens for arm, pairs in nats.items()}
    pair = full.pair("wiki_made|none|token_perplexity", "ridge", "target")
    assert pair is not None
    assert pair.difference.value == pytest.approx(mean["ridge"] - mean["target"])
    assert pair.perplexity_ratio is not None
    assert pair.perplexity_ratio.value == pytest.approx(math.exp(mean["ridge"] - mean["target"]))
    assert full.score("wiki_made|none|token_perplexity", "target").score.value == pytest.approx(math.exp(mean["target"]))
    per_document = [a / n - b / n for (a, n), (b, _) in zip(nats["target"], nats["ridge"], strict=True)]
    assert pair.p == pytest.approx(scipy_stats.ttest_1samp(per_document, 0).pvalue)
    assert pair.won == sum(d < 0 for d in per_document)
    assert pair.retention.value is None


def test_the_average_weighs_tasks_alike_and_leaves_perplexity_out(full: Comparison) -> None:
    average = full.average("ridge", "target")
    assert average is not None
    pairs = [full.pair(name, "ridge", "target") for name in average.tasks]
    assert {name.split("|")[0] for name in average.tasks} == {"mmlu_made", "arc_made", "wino_made", "sums_made", "turns_made"}
    for name in ("difference", "retention", "floor_normalised"):
        assert getattr(average, name).value == pytest.approx(np.mean([getattr(pair, name).value for pair in pairs]))


def test_headline_and_verdicts_say_who_beats_the_source(full: Comparison) -> None:
    ridge, head_local = full.verdicts
    assert ridge.against_source == "better"
    assert head_local.against_source == "worse"
    assert head_local.reading == "do not deploy"
    assert "worse than simply keeping the source model" in head_local.sentence
    assert headline(full).startswith("head_local: mapped is no better than the source model")
    assert "ridge beats the source model" in headline(full)
    assert any("Inconclusive on" in point and "80 % power" in point for point in ridge.points)
    # Its perplexity is better than the source's, its accuracy is not: that has to be said.
    assert any("accuracy and perplexity disagree" in point for point in head_local.points)


def test_a_mapper_that_equals_the_source_is_no_better(tmp_path: Path) -> None:
    samples = {arm: {"c": choice_samples("c", 300, level, name)} for arm, level, name in (
        ("target", 0.72, "t"), ("source", 0.5, "s"), ("ridge", 0.5, "r"), ("zero", 0.26, "z"))}  # fmt: skip
    make_run(tmp_path / "run", arms=("target", "source", "ridge", "zero"), samples=samples, extras=False)
    found = compare(load_runs(tmp_path / "run"), QUICK).comparison
    assert found.verdicts[0].against_source == "not better"
    assert found.verdicts[0].against_zero == "better"
    assert headline(found) == "Mapped is no better than the source model."


def test_a_target_that_is_no_better_than_the_source_has_nothing_to_give(tmp_path: Path) -> None:
    same = choice_samples("c", 300, 0.6, "both")
    samples = {"target": {"c": same}, "source": {"c": same}, "ridge": {"c": choice_samples("c", 300, 0.6, "ridge")}}
    make_run(tmp_path / "run", arms=tuple(samples), samples=samples, extras=False)
    assert "The target itself is not shown to beat the source" in headline(compare(load_runs(tmp_path / "run"), QUICK).comparison)


def test_a_mapper_that_keeps_all_supports_deploying(tmp_path: Path) -> None:
    target = choice_samples("c", 2000, 0.72, "t")
    samples = {"target": {"c": target}, "source": {"c": choice_samples("c", 2000, 0.5, "s")}, "ridge": {"c": target}}
    make_run(tmp_path / "run", arms=("target", "source", "ridge"), samples=samples, extras=False)
    found = compare(load_runs(tmp_path / "run"), QUICK).comparison
    assert found.verdicts[0].reading == "supports deploying"
    pair = found.pair("c|none|acc_norm", "ridge", "target")
    assert pair is not None
    assert (pair.won, pair.lost, pair.p, pair.disposition) == (0, 0, 1.0, "no material loss")
    assert any("no control 'zero'" in note for note in found.notes)


def test_nan_scores_make_figures_undefined_and_are_said(tmp_path: Path) -> None:
    broken = choice_samples("c", 100, 0.6, "small", nan_at=[3, 7])
    found = compare(folders(tmp_path, {"c": choice_samples("c", 100, 0.8, "big")}, {"c": broken}), QUICK).comparison
    pair = found.pair("c|none|acc_norm", "small", "big")
    assert pair is not None
    reason = "arm 'small' has no finite score on 2 of 100 items (doc_id 3, 7)"
    assert pair.difference.value is None
    assert pair.difference.reason == reason
    assert (pair.p, pair.p_reason, pair.disposition) == (None, reason, "inconclusive")
    assert found.score("c|none|acc_norm", "small").score.reason == reason
    assert any(reason in note for note in found.notes)
    average = found.average("small", "big")
    assert average is not None
    assert average.difference.reason == f"no average: {reason}"
    assert found.verdicts[0].reading == "inconclusive"


def test_one_item_is_inconclusive(tmp_path: Path) -> None:
    runs = folders(tmp_path, {"c": choice_samples("c", 1, 1.0, "a"), "f": f1_samples("f", 1, 1, 0.5, "a"), "w": prefix_samples("w", 1, 2.0, "a")},
                   {"c": choice_samples("c", 1, 0.0, "b"), "f": f1_samples("f", 1, 1, 0.4, "b"), "w": prefix_samples("w", 1, 2.1, "b")})  # fmt: skip
    found = compare(runs, QUICK).comparison
    assert {pair.disposition for pair in found.pairs} == {"inconclusive"}
    assert any("c has 1 items, fewer than the 30" in note for note in found.notes)


def test_equal_arms_have_no_p_below_one_and_no_division_by_zero(tmp_path: Path) -> None:
    made = {"c": choice_samples("c", 50, 0.0, "a"), "f": f1_samples("f", 20, 2, 0.5, "a"), "w": prefix_samples("w", 40, 2.0, "a")}
    found = compare(folders(tmp_path, made, made), QUICK).comparison
    choice, graded, text = (found.pair(name, "small", "big") for name in ("c|none|acc_norm", "f|none|f1", "w|none|token_perplexity"))
    assert choice is not None
    assert (choice.p, choice.difference.value) == (1.0, 0.0)
    assert choice.retention.value is None
    assert "zero or below" in str(choice.retention.reason)
    for pair in (graded, text):
        assert pair is not None
        assert pair.p is None
        assert "differences are equal" in str(pair.p_reason)
        assert pair.disposition == "inconclusive"


def test_adding_an_arm_moves_no_other_figure(full: Comparison, full_run: Path) -> None:
    fewer = compare(load_runs(full_run), QUICK, arms=["target", "source", "ridge"]).comparison
    drop = {"p_holm", "p_bh"}
    for pair in fewer.pairs:
        other = full.pair(pair.task_id, pair.arm, pair.reference)
        assert other is not None
        if pair.relation != "context":
            assert pair.model_dump(exclude=drop) == other.model_dump(exclude=drop)


def test_a_seed_fixes_everything(full: Comparison, full_run: Path) -> None:
    again = compare(load_runs(full_run), QUICK).comparison
    assert again == full
    other = compare(load_runs(full_run), QUICK.model_copy(update={"seed": 1})).comparison
    pair, moved = (c.pair("arc_made|none|acc_norm", "head_local", "target") for c in (full, other))
    assert pair is not None
    assert moved is not None
    assert pair.difference == moved.difference
    assert pair.retention.value == moved.retention.value


def test_runs_of_one_pair_share_their_target(tmp_path: Path) -> None:
    make_run(tmp_path / "a", arms=("target", "source", "ridge"), scale=0.2, extras=False)
    make_run(tmp_path / "b", arms=("target", "head_local"), scale=0.2, extras=False)
    found = compare([*load_runs(tmp_path / "a"), *load_runs(tmp_path / "b")], QUICK).comparison
    assert [arm.name for arm in found.arms] == ["target", "source", "ridge", "head_local"]
    assert found.pair("arc_made|none|acc_norm", "ridge", "head_local") is not None


def test_runs_of_other_pairs_are_not_mixed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", arms=("target", "ridge"), scale=0.1, extras=False)
    other = {arm: task_samples("source" if arm == "target" else arm, scale=0.1) for arm in ("target", "head_local")}
    make_run(tmp_path / "b", arms=("target", "head_local"), samples=other, extras=False)
    with pytest.raises(BadInputError, match=r"arm 'target' answers task 'arc_made' differently.*reports of their own"):
        compare([*load_runs(tmp_path / "a"), *load_runs(tmp_path / "b")], QUICK)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = []
    for parent, level in (("one", 0.8), ("two", 0.6)):
        runs += load_runs(write_lm_eval_folder(tmp_path / parent / "out", {"c": choice_samples("c", 40, level, parent)}))
    assert [arm.name for arm in compare(runs, QUICK).comparison.arms] == ["one/out", "two/out"]


def test_kvxfer_arms_of_plain_lm_eval_runs_know_their_role(tmp_path: Path) -> None:
    runs = []
    for name, level, extra in (
        ("t", 0.7, {"arm": "target"}), ("m", 0.7, {"mapper": "out/ridge"}), ("z", 0.3, {"mapper": "zero"}), ("s", 0.5, {"arm": "source"}),
    ):  # fmt: skip
        folder = write_lm_eval_folder(
            tmp_path / name, {"c": choice_samples("c", 60, level, name)}, model="kvxfer", model_args={"pretrained": "big", "source": "small", **extra}
        )
        runs += load_runs(folder)
    found = compare(runs, QUICK).comparison
    assert (found.reference_arm, found.source_arm, found.zero_arm, found.mappers) == ("t", "s", "z", ("m",))
    assert found.title == "small → big"


def test_an_unfinished_run_is_named_and_a_missing_arm_refused(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", arms=("target", "source", "ridge"), scale=0.1, extras=False, finished=False)
    assert any("was not finished" in note for note in compare(load_runs(store.path), QUICK).comparison.notes)
    (store.path / "samples" / "arc_made@ridge.parquet").unlink()
    with pytest.raises(BadInputError, match="arm 'ridge' has no samples of task 'arc_made'"):
        compare(load_runs(store.path), QUICK)


def test_a_control_that_was_spared_a_task_has_no_figure_there_and_averages_over_the_rest(tmp_path: Path) -> None:
    make_run(tmp_path / "all", arms=("target", "source", "ridge", "zero"), scale=0.3, extras=False)
    whole = load_runs(tmp_path / "all")
    (run,) = whole
    gone = (run.frame["arm"] == "zero") & (run.frame["task"] == "arc_made")
    lacking = [dataclasses.replace(run, frame=run.frame[~gone])]
    with pytest.raises(BadInputError, match="arm 'zero' has no samples of task 'arc_made'"):
        compare(lacking, QUICK)
    found, full = compare(lacking, QUICK, spared={"zero": ["arc_made"]}).comparison, compare(whole, QUICK).comparison
    arc = "arc_made|none|acc_norm"
    assert found.pair(arc, "ridge", "zero") is None
    assert found.score(arc, "zero").score.reason == "arm 'zero' was not run on it"
    # Nothing else moves: the same pairs, scores and averages of the arms that answered everything.
    mine, theirs = found.pair(arc, "ridge", "target"), full.pair(arc, "ridge", "target")
    assert mine is not None
    assert theirs is not None
    assert (mine.difference, mine.retention, mine.p, mine.disposition) == (theirs.difference, theirs.retention, theirs.p, theirs.disposition)
    # The adjusted family is smaller by the comparisons that were not made.
    assert found.family == full.family - 1
    assert found.average("ridge", "target") == full.average("ridge", "target")
    over, before = found.average("ridge", "zero"), full.average("ridge", "zero")
    assert over is not None
    assert before is not None
    assert set(before.tasks) - set(over.tasks) == {arc}
    others = [found.score(task, "zero").score.value for task in over.tasks]
    assert found.average("zero", "target").arm_score == pytest.approx(sum(others) / len(others))
    assert "zero was not run on arc_made; its averages are over the other tasks" in found.notes
    line = average_line(found)
    assert line is not None
    assert next(cell for cell in line.cells if cell.arm == "zero").kept.endswith(f"kept, {len(over.tasks)} tasks")
    assert next(cell for line in matrix(found) if line.label == "arc_made" for cell in line.cells if cell.arm == "zero").score == "not run"


def test_the_margin_decides(tmp_path: Path) -> None:
    runs = folders(tmp_path, {"c": choice_samples("c", 400, 0.75, "big")}, {"c": choice_samples("c", 400, 0.72, "small")})
    words = {}
    for margin in (0.0, 0.02, 0.5):
        pair = compare(runs, QUICK.model_copy(update={"margin": margin})).comparison.pair("c|none|acc_norm", "small", "big")
        assert pair is not None
        words[margin] = pair.disposition
    assert words[0.5] == "no material loss"
    assert words[0.0] in ("degraded", "inconclusive")


def test_one_task_that_beats_an_empty_cache_beyond_doubt_shows_that_something_gets_through(tmp_path: Path) -> None:
    """Accuracies near chance must not hide a perplexity that fell; found on the SmolLM2 pair (26 against 1,219)."""
    same = choice_samples("c", 200, 0.26, "chance")
    samples = {
        arm: {"c": same, "wiki_made": prefix_samples("wiki_made", 60, nats, arm)}
        for arm, nats in (("target", 2.6), ("source", 4.0), ("ridge", 3.0), ("zero", 7.0))
    }
    make_run(tmp_path / "run", arms=tuple(samples), samples=samples, extras=False)
    found = compare(load_runs(tmp_path / "run"), QUICK).comparison.verdicts[0]
    assert found.against_zero == "better"
    assert "nothing gets through" not in found.sentence
