"""Task files over local rows: which file stands for which split, what is refused, and what the messages say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.errors import BadInputError
from kvbench.scoring.offline import AVAILABLE, Overlay, data_fingerprint, overlays, tasks_with_data
from kvbench.scoring.taskfiles import find_definitions

ARC = {"id": "1", "question": "Which?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"}
HELLASWAG = {"activity_label": "Run", "ctx_a": "A man", "ctx_b": "", "endings": ["a", "b", "c", "d"], "label": "2"}
MMLU = {"question": "Which?", "subject": "astronomy", "choices": ["a", "b", "c", "d"], "answer": 1}
PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
Write = Callable[..., Path]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def write(data: Path) -> Write:
    def to(name: str, *rows: Mapping[str, Any], text: str | None = None) -> Path:
        file = data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if text is not None else "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return file

    return to


@pytest.fixture
def lay(data: Path, tmp_path: Path) -> Callable[..., list[Overlay]]:
    def over(*tasks: str, **more: Any) -> list[Overlay]:
        return overlays(tasks, data, tmp_path / "out", **more)

    return over


def test_an_overlay_changes_the_data_and_nothing_else(lay, write):
    """Compared with the stock definition as lm-eval reads it."""
    from lm_eval.tasks import TaskManager

    file = write("arc_easy/test.jsonl", ARC)
    (overlay,) = lay("arc_easy")
    assert overlay.files == {"test": file}
    stock = TaskManager(include_path=str(overlay.stock.parent), include_defaults=False).task_index["arc_easy"].cfg
    made = TaskManager(include_path=str(overlay.path.parent), include_defaults=False).task_index["arc_easy"].cfg
    changed = {key for key in {*stock, *made} if stock.get(key) != made.get(key)}
    assert changed == {"dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split", "fewshot_config"}
    assert made["dataset_kwargs"] == {"data_files": {"test": str(file)}}


def test_the_test_file_stands_for_a_missing_validation_split_and_the_note_says_so(lay, write):
    test = write("hellaswag/test.jsonl", HELLASWAG)
    (overlay,) = lay("hellaswag")
    assert overlay.files == {"validation": test}
    assert "evaluated on hellaswag/test.jsonl: there is no validation.jsonl" in overlay.note
    validation = write("hellaswag/validation.jsonl", HELLASWAG)
    write("hellaswag/train.jsonl", HELLASWAG)
    (overlay,) = lay("hellaswag")
    assert overlay.files["validation"] == validation
    assert not overlay.note


def test_a_folder_named_as_the_task_goes_before_that_of_the_data_set(lay, write):
    write("gsm8k/test.jsonl", {"question": "1+1?", "answer": "#### 2"})
    own = write("gsm8k_cot/test.jsonl", {"question": "1+2?", "answer": "#### 3"})
    (overlay,) = lay("gsm8k_cot")
    assert overlay.files == {"test": own}


def test_a_task_outside_the_suite_reads_its_own_folder_and_its_templates_name_the_fields(lay, write):
    write("copa/validation.jsonl", {"premise": "p", "question": "cause", "choice1": "a", "choice2": "b", "label": 0})
    (overlay,) = lay("copa")
    assert list(overlay.files) == ["validation"]
    write("sciq/test.jsonl", {"support": "s", "question": "q", "distractor1": "a", "distractor2": "b", "distractor3": "c"})
    with pytest.raises(BadInputError, match=r"sciq/test.jsonl', line 1: the field 'correct_answer' is missing"):
        lay("sciq")


def test_mmlu_available_holds_the_subjects_with_a_test_split_at_five_shots(lay, write, tmp_path):
    for subject in ("astronomy", "virology"):
        write(f"mmlu/{subject}/dev.jsonl", *[MMLU] * 5)
    write("mmlu/astronomy/test.jsonl", MMLU)
    found = lay(AVAILABLE)
    assert [overlay.task for overlay in found] == ["mmlu_astronomy"]
    assert set(found[0].files) == {"dev", "test"}
    group = yaml.safe_load((tmp_path / "out" / f"group.{AVAILABLE}.yaml").read_text())
    assert group["task"] == [{"task": "mmlu_astronomy", "num_fewshot": 5}]


def test_a_group_without_all_its_data_names_what_is_missing_and_what_is_there(lay, write):
    write("mmlu/astronomy/dev.jsonl", *[MMLU] * 5)
    write("mmlu/astronomy/test.jsonl", MMLU)
    write("arc_easy/test.jsonl", ARC)
    with pytest.raises(
        BadInputError, match=r"no local data for \d+ of 66 tasks: arc_challenge \(arc_challenge/test.jsonl\).*--tasks arc_easy,mmlu_available"
    ):
        lay("kvxfer_suite")


def test_the_suite_asks_for_the_papers_examples():
    """arXiv:2608.03893: MMLU 5-shot, GSM8K 8-shot chain of thought, the others 0-shot; 57 subjects and nine other tasks."""
    leaves = find_definitions(["kvxfer_suite"]).leaves
    assert len(leaves) == 57 + 9
    assert {leaf.num_fewshot for name, leaf in leaves.items() if name.startswith("mmlu_")} == {5}
    rest = {name: leaf.num_fewshot for name, leaf in leaves.items() if not name.startswith("mmlu_")}
    assert {name: shots for name, shots in rest.items() if shots} == {"gsm8k_cot": 8}


def test_few_shot_examples_that_are_not_there_are_refused(lay, write):
    write("mmlu/astronomy/test.jsonl", MMLU)
    with pytest.raises(BadInputError, match=r"mmlu/astronomy/dev.jsonl, for its 5 few-shot examples"):
        lay(AVAILABLE)
    write("piqa/validation.jsonl", PIQA)
    (overlay,) = lay("piqa")
    assert "0-shot only: there is no piqa/train.jsonl" in overlay.note
    with pytest.raises(BadInputError, match=r"piqa/train.jsonl, for its 3 few-shot examples"):
        lay("piqa", num_fewshot=3)


def test_lm_eval_cannot_take_the_evaluated_items_as_examples(lay, write):
    """What it does by itself where a task has no other split."""
    from lm_eval.tasks import TaskManager

    write("arc_easy/test.jsonl", ARC, ARC | {"question": "What?"})
    (overlay,) = lay("arc_easy")
    task = TaskManager(include_path=str(overlay.path.parent), include_defaults=False).load("arc_easy")["tasks"]["arc_easy"]
    assert task.sampler.sample(n=0) == []
    with pytest.raises(BadInputError, match="1 few-shot examples are asked for"):
        task.fewshot_context(task.eval_docs[0], num_fewshot=1)


@pytest.mark.parametrize(
    ("file", "task", "text", "message"),
    [
        ("arc_easy/test.jsonl", "arc_easy", "", r"arc_easy/test.jsonl' has no rows"),
        ("arc_easy/test.jsonl", "arc_easy", "\n\n", r"has no rows"),
        ("arc_easy/test.jsonl", "arc_easy", json.dumps(ARC) + "\n{broken\n", r"test.jsonl', line 2: not JSON"),
        ("arc_easy/test.jsonl", "arc_easy", "[1]\n", r"line 1: a JSON list, not an object"),
        ("arc_easy/test.jsonl", "arc_easy", '{"question": "q"}\n', r"line 1: the field 'choices.text' is missing; the row has question"),
        ("arc_easy/test.jsonl", "arc_easy", json.dumps(ARC | {"answerKey": 2}), r"the field 'answerKey' is 2, but must be a string"),
        ("hellaswag/test.jsonl", "hellaswag", json.dumps(HELLASWAG | {"label": ""}), r"the field 'label' is \"\", but must be one of .*unlabelled"),
        ("piqa/test.jsonl", "piqa", json.dumps(PIQA | {"label": -1}), r"the field 'label' is -1"),
        ("mmlu/astronomy/test.jsonl", "mmlu_astronomy", json.dumps(MMLU | {"choices": ["a"]}), r"'choices' is .*must be a list of 4 strings"),
    ],
)
def test_rows_that_the_task_cannot_read_are_one_clear_error(lay, write, file, task, text, message):
    write(file, text=text)
    with pytest.raises(BadInputError, match=message):
        lay(task)


def test_rows_of_another_encoding_are_refused(lay, data):
    (data / "arc_easy").mkdir()
    (data / "arc_easy" / "test.jsonl").write_bytes(b'{"question": "caf\xe9"}\n')
    with pytest.raises(BadInputError, match="is not UTF-8 text"):
        lay("arc_easy")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["arc_ezy"], r"unknown task 'arc_ezy'; did you mean arc_easy"),
        (["arc_easy"], r"no local data for 1 of 1 tasks: arc_easy \(arc_easy/test.jsonl\); add these files$"),
        (["niah_single_1"], r"niah_single_1 \(it makes its data in code\)"),
        ([AVAILABLE], r"has no mmlu/<subject>/test.jsonl"),
        ([], "no task given"),
    ],
)
def test_tasks_that_cannot_run_are_refused(lay, tasks: Sequence[str], message):
    with pytest.raises(BadInputError, match=message):
        lay(*tasks)


def test_folders_that_cannot_be_used_are_refused(data, write, tmp_path):
    write("arc_easy/test.jsonl", ARC)
    with pytest.raises(BadInputError, match=r"the data folder '.*nowhere' does not exist"):
        overlays(["arc_easy"], tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInputError, match="is a file"):
        overlays(["arc_easy"], data, tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.yaml").write_text("task: mine\n")
    with pytest.raises(BadInputError, match=r"holds task.yaml, which kvbench did not write"):
        overlays(["arc_easy"], data, tmp_path / "mine")


def test_writing_again_leaves_nothing_of_before(lay, write, tmp_path):
    write("arc_easy/test.jsonl", ARC)
    write("piqa/test.jsonl", PIQA)
    lay("arc_easy")
    lay("piqa", "tiny_suite")
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"piqa.yaml", "tiny_choice.yaml", "group.tiny_suite.yaml"}
    assert not (tmp_path / "out" / "arc_easy.yaml").exists()


def test_the_fingerprint_is_of_the_rows_and_not_of_the_place(lay, write, data):
    file = write("arc_easy/test.jsonl", ARC)
    first = data_fingerprint(lay("arc_easy")[0])
    data.rename(data.with_name("moved"))
    (moved,) = overlays(["arc_easy"], data.with_name("moved"), data.with_name("out"))
    assert data_fingerprint(moved) == first
    moved.files["test"].write_text(json.dumps(ARC | {"question": "What?"}))
    assert data_fingerprint(moved) != first
    assert not file.exists()


def test_which_tasks_a_folder_has_data_for(data, write):
    write("arc_easy/test.jsonl", ARC)
    write("mmlu/astronomy/dev.jsonl", *[MMLU] * 5)
    write("mmlu/astronomy/test.jsonl", MMLU)
    assert tasks_with_data(data) == ["arc_easy", AVAILABLE]


def test_export_prints_what_to_give_to_lm_eval(run_cli, write, data, tmp_path):
    write("arc_easy/test.jsonl", ARC)
    done = run_cli("tasks", "export", "--data-dir", data, "--out", tmp_path / "tasks", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["include_path"] == str(tmp_path / "tasks")
    assert [task["name"] for task in told["tasks"]] == told["names"] == ["arc_easy"]
    refused = run_cli("tasks", "export", "--data-dir", data, "--out", tmp_path / "tasks", "--tasks", "piqa")
    assert refused.returncode == 2
    assert refused.stderr.startswith("kvbench: no local data for 1 of 1 tasks: piqa (piqa/validation.jsonl)")
    assert "Traceback" not in refused.stderr
