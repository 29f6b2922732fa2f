"""The command line: the whole way on the embedded pair, and one clear message for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PAIR = ("embedded:source", "embedded:target")
SMALL = ("--data", "embedded:world", "--sequences", 20, "--heldout", 5, "--seq-len", 128, "--stride", 1)


@pytest.fixture(scope="module")
def moments(run_cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("way") / "moments"
    done = run_cli("calibrate", *PAIR, *SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "memory plan: moments" in done.stderr
    assert done.stdout.strip() == str(out)
    return out


@pytest.fixture(scope="module")
def ridge(run_cli, moments: Path) -> Path:
    out = moments.parent / "ridge"
    done = run_cli("fit", moments, "--set", "k=2", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "p/n" in done.stderr
    return out


def test_the_whole_way(run_cli, ridge):
    run = ridge.parent / "run"
    command = ("evaluate", *PAIR, "--mapper", f"mine={ridge}", "--tasks", "tiny_choice,tiny_sums", "--limit", 12, "--out", run)
    done = run_cli(*command)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout
    assert (run / "provenance.json").exists()
    assert not (run / "answers.sqlite").exists()
    again = run_cli(*command)
    assert again.returncode == 0
    assert "finished already" in again.stderr
    other = run_cli(*command[:-3], 13, "--out", run)
    assert other.returncode == 2
    assert "limit" in other.stderr
    report = run_cli("report", run, "--out", ridge.parent / "report")
    assert report.returncode == 0, report.stderr
    assert (ridge.parent / "report" / "report.html").exists()
    shown = run_cli("mapper", "show", ridge, "--json")
    assert json.loads(shown.stdout)["recipe"]["k"] == 2
    assert run_cli("mapper", "verify", ridge).returncode == 0


def test_damaged_moments_are_named(run_cli, moments, tmp_path):
    import shutil

    copy = shutil.copytree(moments, tmp_path / "copy")
    file = next(copy.glob("moments.fit.*.safetensors"))
    file.write_bytes(file.read_bytes()[:3000])
    done = run_cli("fit", copy, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "are damaged" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_k_needs_no_model(run_cli, moments, tmp_path):
    done = run_cli("fit", moments, "--set", "k=all", "--set", "lambda=0.1", "--set", "lambda_kind=relative", "--out", tmp_path / "all", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]["lambda_"] == 0.1


def _damage(path: Path, how: str) -> None:
    import shutil

    if how == "byte":
        data = bytearray((path / "weights.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "weights.safetensors").write_bytes(data)
    elif how == "missing":
        (path / "weights.safetensors").unlink()
    elif how == "extra":
        (path / "note.txt").write_text("x")
    elif how == "sums":
        (path / "SHA256SUMS").unlink()
    elif how == "folder":
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("byte", "was changed"),
        ("missing", "lacks the file"),
        ("extra", "not in SHA256SUMS"),
        ("sums", "has no SHA256SUMS"),
        ("folder", "neither a control"),
    ],
)
def test_a_damaged_artifact_is_named(run_cli, ridge, tmp_path, how, message):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(ridge, copy)
    _damage(copy, how)
    done = run_cli("mapper", "verify", copy)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"format": "other"}, "of format 'other'"),
        ({"recipe": {"method": "nothing"}}, "unknown mapper recipe 'nothing'"),
    ],
)
def test_a_foreign_manifest_is_named(ridge, tmp_path, change, message):
    import shutil

    from kvbench.errors import KVBenchError
    from kvbench.mappers.artifact import load_mapper

    copy = tmp_path / "copy"
    shutil.copytree(ridge, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(KVBenchError, match=message):
        load_mapper(copy, verify=False)


@pytest.mark.parametrize(
    ("field", "message"),
    [("tokenizer_fingerprint", "tokenizer"), ("config_fingerprint", "configuration"), ("revision", "revision"), ("weights_fingerprint", "weights")],
)
def test_another_model_is_refused_with_both_values(field, message):
    from kvbench.errors import ArtifactError
    from kvbench.pairs.pins import check_pin

    stored = {"name": "a", "tokenizer_fingerprint": "t", "config_fingerprint": "c", "revision": "r", "weights_fingerprint": "w"}
    check_pin(stored, {**stored, "name": "b"}, "source", "mapper 'm'")
    with pytest.raises(ArtifactError, match=f"{message}.*other"):
        check_pin(stored, {**stored, field: "other"}, "source", "mapper 'm'")


def test_a_mapper_of_another_pair_is_refused(run_cli, ridge, tmp_path):
    done = run_cli("evaluate", "embedded:stranger", "embedded:target", "--mapper", ridge, "--tasks", "tiny_choice", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "was fitted for source 'embedded:source'" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("calibrate", *PAIR, "--data", "nowhere.jsonl", "--out", "OUT"), 2, "does not exist"),
        (("calibrate", "./nowhere", "embedded:target", *SMALL, "--out", "OUT"), 2, "nowhere"),
        (("calibrate", *PAIR, *SMALL, "--source-layers", "9", "--out", "OUT"), 2, "layers 0 to 3"),
        (("calibrate", *PAIR, *SMALL[:2], "--sequences", 10**7, "--out", "OUT"), 2, "not enough calibration text"),
        (("calibrate", *PAIR, *SMALL, "--dtype", "float7", "--out", "OUT"), 2, "dtype 'float7' is unknown"),
        (("fit", "nowhere", "--out", "OUT"), 2, "not a directory"),
        (("evaluate", *PAIR, "--tasks", "tiny_choise", "--out", "OUT"), 2, "tiny_choise"),
        (("evaluate", *PAIR, "--mapper", "nowhere", "--tasks", "tiny_choice", "--out", "OUT"), 2, "neither a control"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--limit", "-3", "--out", "OUT"), 2, "--limit"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--batch-size", "0", "--out", "OUT"), 2, "--batch-size 0"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--limit", "nan", "--out", "OUT"), 2, "--limit nan"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--limit", "inf", "--out", "OUT"), 2, "--limit inf"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--num-fewshot", "-1", "--out", "OUT"), 2, "--num-fewshot -1"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--hold-back", "0", "--out", "OUT"), 2, "--hold-back 0"),
        (("evaluate", *PAIR, "--tasks", "tiny_choice", "--max-length", "100000", "--out", "OUT"), 2, "has 1,024 positions"),
        (("evaluate", *PAIR, "--tasks", "tiny_sums", "--gen-kwargs", "foo", "--out", "OUT"), 2, "--gen-kwargs 'foo'"),
        (("evaluate", *PAIR, "--tasks", "tiny_sums", "--mapper", "a=zero", "--mapper", "a=raw", "--out", "OUT"), 2, "two arms would be called 'a'"),
        (("calibrate", *PAIR, *SMALL[:2], "--seq-len", "100000", "--out", "OUT"), 2, "has 1,024 positions"),
        (("diagnose", *PAIR, "--mapper", "raw", "--prefix", "5000", "--out", "OUT"), 2, "has 1,024 positions"),
        (("handoff", *PAIR, "--mapper", "raw", "--out", "/proc/x"), 2, "cannot write"),
        (("demo", "--out", "/proc/x"), 2, "cannot write"),
        (("evaluate", *PAIR, "--tasks", "arc_easy", "--data-dir", "nowhere", "--out", "OUT"), 2, "nowhere"),
        (("mapper", "show", "nowhere"), 2, "neither a control"),
        (("report", "nowhere", "--out", "OUT"), 2, "nowhere"),
        (("check", "embedded:nobody", "embedded:target"), 2, "embedded"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing_behind(run_cli, tmp_path, arguments, status, message):
    done = run_cli(*(str(tmp_path / "out") if a == "OUT" else a for a in arguments))
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["k=9"], "k = 9"),
        (["k=0"], "k = 0"),
        (["lambda=-1"], "lambda"),
        (["k=one"], "k"),
        (["depth=3"], "no setting 'depth'"),
        (["k"], "key=value"),
    ],
)
def test_wrong_settings(run_cli, moments, tmp_path, settings, message):
    done = run_cli("fit", moments, *(x for s in settings for x in ("--set", s)), "--out", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_recipe_is_guessed(run_cli, moments, tmp_path):
    done = run_cli("fit", moments, "--recipe", "rigde", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "did you mean 'ridge'" in done.stderr
