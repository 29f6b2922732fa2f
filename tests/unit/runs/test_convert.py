from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from lm_eval_samples import choice_samples, f1_samples, prefix_samples, sum_samples, write_lm_eval_folder

from kvbench.errors import BadInputError
from kvbench.runs import load_frame, rows_from_lm_eval


def test_a_choice_item_keeps_its_answer_choices_and_scores() -> None:
    (sample,) = choice_samples("t", 1, 1.0, "target")
    (row,) = rows_from_lm_eval([sample], "t", "target", higher_is_better={"acc": True}, n_context_tokens={0: 12})
    assert row.choice == row.gold_choice == sample["target"]
    assert row.gold == sample["doc"]["choices"][sample["target"]]
    assert row.choices == tuple(f" {word}" for word in sample["doc"]["choices"])
    assert row.loglikelihoods == tuple(answer[0] for answer in sample["filtered_resps"])
    assert row.metrics == {"acc": 1.0, "acc_norm": 1.0}
    assert row.higher_is_better == {"acc": True}
    assert row.n_context_tokens == 12
    assert row.text is None


def test_a_generated_item_keeps_text_before_and_after_the_filter() -> None:
    strict, flexible = rows_from_lm_eval(sum_samples("t", 1, 1.0, "target"), "t", "target")
    assert (strict.filter, flexible.filter) == ("strict-match", "flexible-extract")
    assert strict.text == strict.gold
    assert strict.response == f" It is {strict.gold}."
    assert strict.loglikelihoods == ()
    assert strict.choice is None


def test_a_perplexity_becomes_nats_and_a_size() -> None:
    (sample,) = prefix_samples("t", 1, 2.0, "target")
    (row,) = rows_from_lm_eval([sample], "t", "target")
    loglikelihood, tokens = sample["token_perplexity"]
    assert row.metrics == {"token_perplexity": -loglikelihood}
    assert row.sizes == {"token_perplexity": float(tokens)}
    assert row.higher_is_better == {"token_perplexity": False}


def test_group_labels_come_from_the_document() -> None:
    rows = rows_from_lm_eval(f1_samples("t", 2, 2, 0.5, "target"), "t", "target")
    assert [row.groups for row in rows] == [{"conversation": f"c{i // 2}", "turn": str(i % 2 + 1)} for i in range(4)]


def test_an_item_with_a_nan_has_no_score() -> None:
    broken, fine = rows_from_lm_eval(choice_samples("t", 2, 1.0, "target", nan_at=[0]), "t", "target")
    assert broken.metrics == {"acc": None, "acc_norm": None}
    assert broken.loglikelihoods[0] is None
    assert broken.choice is None
    assert fine.metrics == {"acc": 1.0, "acc_norm": 1.0}


def test_minus_infinity_is_a_bad_choice_but_a_choice() -> None:
    (sample,) = choice_samples("t", 1, 1.0, "target")
    wrong = (sample["target"] + 1) % 4
    sample["resps"][wrong] = [(-math.inf, False)]
    sample["filtered_resps"][wrong] = (-math.inf, False)
    (row,) = rows_from_lm_eval([sample], "t", "target")
    assert row.loglikelihoods[wrong] is None
    assert row.metrics["acc"] == 1.0
    assert row.choice == sample["target"]


def test_contexts_that_differ_are_shown_as_choices() -> None:
    # As winogrande: two contexts, one continuation.
    (sample,) = choice_samples("t", 1, 1.0, "target", choices=2)
    sample["arguments"] = [("The cup fits the box since the cup", " is small."), ("The cup fits the box since the box", " is small.")]
    (row,) = rows_from_lm_eval([sample], "t", "target")
    assert row.choices == ("cup", "box")


def test_request_hash_sees_what_the_prompt_hash_does_not() -> None:
    (sample,) = choice_samples("t", 1, 1.0, "target")
    (row,) = rows_from_lm_eval([sample], "t", "target")
    sample["arguments"][3] = (sample["arguments"][3][0], " other")
    (changed,) = rows_from_lm_eval([sample], "t", "target")
    assert changed.prompt_hash == row.prompt_hash
    assert changed.request_hash != row.request_hash


def test_a_foreign_sample_is_refused_with_its_number() -> None:
    with pytest.raises(BadInputError, match=r"sample 0 of task 't' \(arm 'a'\) is not an lm-eval 0.4 sample: KeyError 'doc_id'"):
        rows_from_lm_eval([{"doc": {}}], "t", "a")


def test_memory_and_disk_give_the_same_rows(tmp_path: Path) -> None:
    samples = {"c": choice_samples("c", 3, 0.5, "target"), "s": sum_samples("s", 3, 0.5, "target"), "p": prefix_samples("p", 3, 2.0, "target")}
    frame = load_frame(write_lm_eval_folder(tmp_path / "target", samples))
    assert len(frame) == 3 + 6 + 3
    for task, listed in samples.items():
        for row, (_, stored) in zip(rows_from_lm_eval(listed, task, "target"), frame[frame["task"] == task].iterrows(), strict=True):
            for name in ("filter", "doc_id", "doc_hash", "prompt_hash", "target_hash", "request_hash", "prompt"):
                assert stored[name] == getattr(row, name)
            assert list(stored["loglikelihoods"]) == list(row.loglikelihoods)
            assert {name: stored[f"metric.{name}"] for name in row.metrics} == row.metrics


def test_a_cut_sample_file_names_its_line(tmp_path: Path) -> None:
    folder = write_lm_eval_folder(tmp_path / "target", {"c": choice_samples("c", 3, 0.5, "target")})
    (file,) = folder.rglob("samples_*.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:40]]))
    with pytest.raises(Exception, match="line 2 is cut or damaged"):
        load_frame(folder)


def test_results_without_samples_are_refused(tmp_path: Path) -> None:
    folder = write_lm_eval_folder(tmp_path / "target", {"c": choice_samples("c", 3, 0.5, "target")})
    next(folder.rglob("samples_*.jsonl")).unlink()
    with pytest.raises(BadInputError, match=r"no samples.*--log_samples"):
        load_frame(folder)


def test_an_empty_folder_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="neither a kvbench run"):
        load_frame(tmp_path)
    with pytest.raises(BadInputError, match="there is no directory"):
        load_frame(tmp_path / "none")


def test_the_newest_of_two_results_counts_and_is_named(tmp_path: Path) -> None:
    from kvbench.runs import load_runs

    folder = write_lm_eval_folder(tmp_path / "target", {"c": choice_samples("c", 3, 0.0, "old")}, date="2026-01-01T00-00-00.0")
    write_lm_eval_folder(folder, {"c": choice_samples("c", 3, 1.0, "new")}, date="2026-01-02T00-00-00.0", model_args={"pretrained": "/models/target"})
    (run,) = load_runs(folder)
    assert run.frame["metric.acc"].mean() == 1.0
    assert "holds 2 results; the newest" in run.notes[0]


def test_aggregated_groups_are_pooled_and_plain_lists_are_not(tmp_path: Path) -> None:
    from kvbench.runs import load_runs

    folder = write_lm_eval_folder(tmp_path / "m", {name: choice_samples(name, 3, 0.5, "m") for name in ("mmlu_a", "mmlu_b", "x")})
    (file,) = folder.rglob("results_*.json")
    results = json.loads(file.read_text())
    results["groups"] = {"mmlu": {"acc,none": 0.5, "alias": "mmlu"}, "mmlu_stem": {"acc,none": 0.5}, "plain": {"alias": "plain"}}
    results["group_subtasks"] = {"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_a", "mmlu_b"], "plain": ["x", "mmlu_a"]}
    file.write_text(json.dumps(results))
    assert load_runs(folder)[0].pooled == {"mmlu": ("mmlu_a", "mmlu_b")}
