"""`kvbench screen`, `kvbench diagnose` and `mapper verify --against` as a user calls them, on the embedded family."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from kvbench.errors import ArtifactError
from kvbench.paths import mappers_directory
from kvbench.runs.files import read_stored
from kvbench.runs.measured import FIGURE_NAMES, Diagnostics
from kvbench.runs.verdict import Verdict
from kvbench.screening import verify
from kvbench.screening.policy import default_text

SOURCE, STRANGER, TARGET = "embedded:source", "embedded:stranger", "embedded:target"


def kvbench(*arguments, check=None, cwd=None):
    done = subprocess.run(
        [sys.executable, "-m", "kvbench", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if check is not None:
        assert done.returncode == check, done.stderr[-3000:]
    return done


def verdict_of(path: Path) -> Verdict:
    return read_stored(path / "verdict.json", Verdict)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    out = tmp_path_factory.mktemp("screen") / "good"
    return out, kvbench("screen", SOURCE, TARGET, "--out", out, check=0)


def test_the_pair_that_transfers_is_deployed(deployed):
    out, done = deployed
    verdict = verdict_of(out)
    assert (verdict.verdict, verdict.reason, verdict.exit_code) == ("deploy", "passed", 0)
    assert [s.name for s in verdict.stages] == ["check", "gates", "calibrate", "fit", "diagnose", "canary", "suite", "timing"]
    assert all(s.state == "done" for s in verdict.stages)
    assert all(c.passed for c in verdict.criteria if c.required)
    kinds = {c.id.split(".")[0] for c in verdict.criteria}
    assert kinds == {"check", "gate", "canary", "retention", "text", "better_than_source", "speed", "warning"}
    assert done.stdout.strip().splitlines()[-1].endswith("verdict.json")
    assert "plan, budget quick" in done.stderr
    page = (out / "report" / "report.html").read_text()
    assert verdict.policy_fingerprint in page
    assert ">deploy</span>" in page
    markdown = (out / "report" / "report.md").read_text()
    assert "### Screen: deploy" in markdown
    assert "Latency" in page
    assert "Layer by layer" in page


def test_the_verdict_carries_what_a_router_needs(deployed):
    out, _ = deployed
    signature = verdict_of(out).signature
    assert (signature.source.name, signature.target.name) == (SOURCE, TARGET)
    for side in (signature.source, signature.target):
        for name in ("config_fingerprint", "weights_fingerprint", "tokenizer_fingerprint", "files", "kv_heads", "head_dim", "dtype", "rope"):
            assert getattr(side, name), name
    assert signature.head_order == "layer,head,dim"
    assert signature.recipe["method"] in ("ridge", "head_local")
    assert (out / signature.mapper / "manifest.json").is_file()


def test_verify_against_needs_no_torch_and_knows_the_pair(deployed):
    out, _ = deployed
    code = (
        "import sys\nfrom kvbench.cli import main\nsys.argv = ['kvbench', 'mapper', 'verify', sys.argv[1], '--against', sys.argv[2], sys.argv[3]]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('status', end.code)\nprint('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out), SOURCE, TARGET], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "False False", done.stdout + done.stderr
    assert "belongs to" in done.stdout
    wrong = kvbench("mapper", "verify", out / "mapper", "--against", STRANGER, TARGET, "--json", check=4)
    found = json.loads(wrong.stdout)
    assert not found["passed"]
    assert {f["what"] for f in found["findings"] if f["status"] == "differs"} == {"source weights", "source configuration"}


def test_verify_against_notices_another_artifact_than_the_one_screened(deployed, tmp_path):
    out, _ = deployed
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    # An intact mapper of the same pair, but not the one that was screened.
    shutil.rmtree(copy / "mapper")
    shutil.copytree(mappers_directory() / "artifacts" / "embedded-head_local", copy / "mapper")
    done = kvbench("mapper", "verify", copy, "--against", SOURCE, TARGET, check=4)
    assert "differs" in done.stdout
    assert "artifact is the one that was screened" in done.stdout


def test_the_same_command_goes_on_and_another_one_is_refused(deployed):
    out, _ = deployed
    before = verdict_of(out)
    again = kvbench("screen", SOURCE, TARGET, "--out", out, check=0)
    assert "is finished already" in again.stderr
    assert verdict_of(out).criteria == before.criteria
    other = kvbench("screen", SOURCE, TARGET, "--out", out, "--limit", 60, check=2)
    assert "holds a screen with another budget" in other.stderr
    assert "Traceback" not in other.stderr


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone"])
def test_verify_against_sees_a_damaged_artifact(deployed, tmp_path, harm):
    """A router relies on it at start-up; the models and the checksums' own file were compared, and the weights were not."""
    out, _ = deployed
    copy = shutil.copytree(out, tmp_path / "copy")
    weights = copy / "mapper" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    if harm == "gone":
        weights.unlink()
    elif harm == "cut":
        weights.write_bytes(content[:1000])
    else:
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    for artifact in (copy, copy / "mapper"):
        found = kvbench("mapper", "verify", artifact, "--against", SOURCE, TARGET, check=2)
        assert "weights.safetensors" in found.stderr


def test_large_artifacts_are_checked_by_size(deployed, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "HASHED_BYTES", 0)
    copy = shutil.copytree(deployed[0] / "mapper", tmp_path / "mapper")
    assert verify.verify_against(copy, SOURCE, TARGET).passed
    weights = copy / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="not as many as its header says"):
        verify.verify_against(copy, SOURCE, TARGET)
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"lacks the file weights\.safetensors"):
        verify.verify_against(copy, SOURCE, TARGET)


def test_a_verdict_that_was_edited_or_is_not_there_yet(deployed, tmp_path):
    copy = shutil.copytree(deployed[0], tmp_path / "copy")
    verdict = json.loads((copy / "verdict.json").read_text())
    next(c for c in verdict["criteria"] if c["required"])["passed"] = False
    (copy / "verdict.json").write_text(json.dumps(verdict))
    assert "it was changed" in kvbench("mapper", "verify", copy, "--against", SOURCE, TARGET, check=2).stderr
    (copy / "verdict.json").unlink()
    assert "no verdict yet" in kvbench("mapper", "verify", copy, "--against", SOURCE, TARGET, check=2).stderr
    (copy / "stages.json").write_text("x")
    assert "is damaged" in kvbench("screen", SOURCE, TARGET, "--out", copy, check=2).stderr
    assert "is a screen" in kvbench("report", copy, "--out", tmp_path / "report", check=2).stderr
    assert "intact" in kvbench("mapper", "verify", deployed[0], check=0).stdout


@pytest.mark.parametrize("arguments", [("embedded:nosuch", TARGET), (SOURCE, TARGET, "--data", "nosuch.txt")])
def test_a_mistake_leaves_nothing_behind(tmp_path, arguments):
    out = tmp_path / "out"
    kvbench("screen", *arguments, "--out", out, check=2)
    assert not out.exists()


def test_a_screen_that_was_moved_goes_on(deployed, tmp_path):
    """The runs inside once named the artifact by the path the screen had when it began."""
    out, _ = deployed
    moved = shutil.copytree(out, tmp_path / "elsewhere")
    (moved / "verdict.json").unlink()  # stopped just before the end
    kvbench("screen", SOURCE, TARGET, "--out", moved, check=0)
    assert verdict_of(moved).criteria == verdict_of(out).criteria


def test_the_stranger_is_stopped_by_the_canary(tmp_path):
    done = kvbench("screen", STRANGER, TARGET, "--out", tmp_path / "bad", "--json", check=4)
    verdict = Verdict.model_validate_json(done.stdout)
    assert (verdict.verdict, verdict.reason, verdict.settled_by) == ("do-not-deploy", "quality", "canary")
    assert [c.id for c in verdict.failed] == ["canary.tiny_sums"]
    assert [s.state for s in verdict.stages][-3:] == ["settled", "not reached", "not reached"]
    assert (tmp_path / "bad" / "report" / "report.html").is_file()


def test_few_items_never_deploy(tmp_path):
    kvbench("screen", SOURCE, TARGET, "--out", tmp_path / "few", "--limit", 20, check=3)
    verdict = verdict_of(tmp_path / "few")
    assert verdict.verdict == "inconclusive"
    assert {c.id for c in verdict.open} >= {"canary.tiny_sums", "retention.task.tiny_choice", "better_than_source.average"}
    assert not verdict.failed


def test_a_pair_of_one_model_has_nothing_to_gain(tmp_path):
    kvbench("screen", TARGET, TARGET, "--out", tmp_path / "self", "--lengths", "256", check=4)
    verdict = verdict_of(tmp_path / "self")
    assert verdict.reason == "nothing to gain"
    assert all(c.passed for c in verdict.criteria if c.id.startswith(("retention", "canary", "text")))


def test_a_random_mapper_passes_no_policy(tmp_path):
    values = yaml.safe_load(default_text())
    values["canary"]["tasks"] = []
    values["retention"] = {"task": 0.3, "average": 0.3}
    values["min_items"], values["better_than_source"] = 30, {"average": False, "text": False}
    lax = tmp_path / "lax.yaml"
    lax.write_text(yaml.safe_dump(values))
    tasks = ("--tasks", "tiny_choice,tiny_prefix", "--lengths", "64")
    kvbench("screen", SOURCE, TARGET, "--mapper", "random", "--policy", lax, "--out", tmp_path / "random", *tasks, check=4)
    verdict = verdict_of(tmp_path / "random")
    assert verdict.reason == "quality"
    assert verdict.policy["retention"]["task"] == 0.3


def test_another_tokenizer_is_refused_at_check(tmp_path):
    from kvbench.embedded import member_path

    shuffled = tmp_path / "shuffled"
    shutil.copytree(member_path("source"), shuffled)
    tokenizer = json.loads((shuffled / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = [name for name in vocabulary if name.strip("\u2581").isalpha()][:40]
    for one, other in zip(names[::2], names[1::2], strict=True):
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (shuffled / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = tmp_path / "out"
    kvbench("screen", shuffled, TARGET, "--data", "embedded:world", "--tasks", "tiny_choice", "--out", out, check=4)
    verdict = verdict_of(out)
    assert (verdict.reason, verdict.settled_by) == ("refused", "check")
    assert "unequal ids" in verdict.sentence
    assert "do-not-deploy" in (out / "report" / "report.html").read_text()
    assert not (out / "moments").exists()


def test_a_killed_screen_goes_on(tmp_path):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "kvbench", "screen", SOURCE, TARGET, "--out", str(out), "--limit", "40", "--lengths", "64"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (out / "candidates").exists() and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert (out / "moments").is_dir()
    assert not (out / "verdict.json").exists()
    stamp = (out / "moments" / "manifest.json").stat().st_mtime_ns
    kvbench("screen", SOURCE, TARGET, "--out", out, "--limit", 40, "--lengths", 64, check=3)
    assert (out / "moments" / "manifest.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SOURCE,), "name the source and the target"),
        ((SOURCE, TARGET), "name a directory with --out"),
        ((SOURCE, TARGET, "--out", "x", "--budget", "cheap"), "--budget 'cheap' is unknown"),
        ((SOURCE, TARGET, "--out", "x", "--policy", "nowhere.yaml"), "policy file 'nowhere.yaml' does not exist"),
        ((SOURCE, TARGET, "--out", "x", "--tasks", "tiny_chioce"), "did you mean tiny_choice"),
        ((SOURCE, TARGET, "--out", "x", "--lengths", "64,32"), "give ascending lengths"),
        ((SOURCE, TARGET, "--out", "x", "--limit", "0"), "--limit 0"),
        ((SOURCE, TARGET, "--out", "x", "--mapper", "nowhere"), "mapper 'nowhere' is neither"),
        ((STRANGER, TARGET, "--out", "x", "--mapper", "embedded:ridge"), "was fitted for source 'embedded:source'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    done = kvbench("screen", *arguments, check=2, cwd=tmp_path)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_diagnose_writes_figures_and_tables(tmp_path):
    out = tmp_path / "diagnosed"
    mappers = ("--mapper", "embedded:ridge", "--mapper", "embedded:mean")
    done = kvbench(
        "diagnose",
        SOURCE,
        TARGET,
        *mappers,
        "--data",
        "embedded:world",
        "--prefix",
        "32,64",
        "--suffix",
        "32",
        "--sequences",
        "10",
        "--out",
        out,
        check=0,
    )
    found = read_stored(out / "diagnostics.json", Diagnostics)
    assert found.arms() == ("embedded:ridge", "embedded:mean", "raw", "random", "zero", "source")
    assert found.prefixes() == (32, 64)
    assert {f.name for f in found.entry("embedded:ridge").figures} == set(FIGURE_NAMES)
    assert found.figure("embedded:ridge", "kl_nats").value < found.figure("zero", "kl_nats").value
    assert "behind the" in found.data["kept_apart"]
    names = {p.name for p in (out / "figures").glob("*.png")}
    assert names >= {"cosine.png", "agreement.png", "error_position.png", "error_class.png", "length_kl_nats.png", "r2_0.png"}
    assert (out / "figures.csv").read_text().count("attention_cosine_native,") == 10
    assert "10 sequences" in done.stderr
    assert kvbench("diagnose", SOURCE, TARGET, *mappers, "--data", "embedded:world", "--out", out, check=2).stderr.count("exists already") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "embedded:world", "--prefix", "64,32"), "give ascending lengths"),
        (("--data", "embedded:world", "--prefix", "many"), "not a comma-separated list"),
        (("--data", "embedded:world", "--prefix", "2000"), "has 1,024 positions"),
        (("--data", "embedded:world", "--moments", "nowhere"), "--data and --moments name two texts"),
        (("--data", "embedded:world", "--sequences", "0"), "--sequences 0"),
        (("--data", "embedded:world", "--mapper", "a=embedded:ridge", "--mapper", "a=embedded:mean"), "two arms would be called 'a'"),
    ],
)
def test_diagnose_refuses_in_one_line(tmp_path, arguments, message):
    done = kvbench("diagnose", SOURCE, TARGET, "--mapper", "embedded:ridge", *arguments, "--out", tmp_path / "x", check=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()
