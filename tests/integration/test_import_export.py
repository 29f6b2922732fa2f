"""`kvbench mapper import | export` on the embedded pair: what went out and came in again scores as before, and says what it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file

from kvbench.paths import mappers_directory

PAIR = ("embedded:source", "embedded:target")
NAMED = ("--source", PAIR[0], "--target", PAIR[1])


@pytest.fixture(scope="module")
def imported(run_cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts `router` (models named) and `veloxquant` (nothing known), both from embedded:ridge."""
    folder = tmp_path_factory.mktemp("foreign")
    for kind, named in (("router", NAMED), ("veloxquant", ())):
        out = run_cli("mapper", "export", "embedded:ridge", "--to", kind, "--out", folder / f"foreign-{kind}")
        assert out.returncode == 0, out.stderr
        assert out.stdout.strip() == str(folder / f"foreign-{kind}")
        assert ("no revision of the source is pinned" in out.stderr) == (kind == "router")
        back = run_cli("mapper", "import", folder / f"foreign-{kind}", "--from", kind, *named, "--out", folder / kind)
        assert back.returncode == 0, back.stderr
        assert back.stdout.strip() == str(folder / kind)
    return folder


def test_no_bit_changes(imported):
    original = load_file(mappers_directory() / "artifacts" / "embedded-ridge" / "weights.safetensors")
    for kind in ("router", "veloxquant"):
        again = load_file(imported / kind / "weights.safetensors")
        assert again.keys() == original.keys()
        assert all((again[name] == tensor).all() and again[name].dtype == tensor.dtype for name, tensor in original.items())


def test_show_and_verify_say_what_is_unknown(run_cli, imported):
    assert run_cli("mapper", "verify", imported / "router").returncode == 0
    named = run_cli("mapper", "show", imported / "router").stdout
    assert "imported from: router" in named
    assert "source weights_fingerprint" in named
    assert "source tokenizer_fingerprint" not in named
    unnamed = run_cli("mapper", "show", imported / "veloxquant").stdout
    assert "source unknown revision unknown config unknown weights unknown tokenizer unknown" in unnamed
    assert "source tokenizer_fingerprint" in unnamed
    assert "R2 in-sample" in unnamed
    assert json.loads(run_cli("mapper", "show", imported / "veloxquant", "--json").stdout)["source"]["unknown"]


def test_an_imported_map_scores_as_the_original_and_the_report_names_the_unknowns(run_cli, imported, tmp_path):
    run = tmp_path / "run"
    mappers = (
        "--mapper",
        "original=embedded:ridge",
        "--mapper",
        f"router={imported / 'router'}",
        "--mapper",
        f"veloxquant={imported / 'veloxquant'}",
    )
    done = run_cli("evaluate", *PAIR, *mappers, "--control", "none", "--tasks", "tiny_choice", "--limit", 8, "--out", run)
    assert done.returncode == 0, done.stderr
    assert "mapper 'veloxquant': unknown: source revision" in done.stderr
    scores = {arm: pd.read_parquet(run / "samples" / f"tiny_choice@{arm}.parquet")["loglikelihoods"] for arm in ("original", "router", "veloxquant")}
    for name in ("router", "veloxquant"):
        # The bits of the weights are equal (test above); the arms stand at other rows of a batch, where matrix kernels may round otherwise.
        for mine, original in zip(scores[name], scores["original"], strict=True):
            assert list(mine) == pytest.approx(list(original), abs=1e-4)
    arms = {arm["name"]: arm for arm in json.loads((run / "spec.json").read_text())["arms"]}
    assert arms["router"]["pin"]["imported from"] == "router"
    assert "unknown" not in arms["original"]["pin"]
    report = run_cli("report", run, "--out", tmp_path / "report")
    assert report.returncode == 0, report.stderr
    assert "imported from" in (tmp_path / "report" / "report.html").read_text()
    assert "source tokenizer_fingerprint" in (tmp_path / "report" / "report.html").read_text()


def test_one_message_and_status_2(run_cli, imported, tmp_path):
    for arguments, message in (
        (("import", imported / "foreign-router", "--from", "kvxfer"), "expected maps.json"),
        (("import", imported / "foreign-router", "--from", "router", "--target", "embedded:source"), "but the target has layers 0 to 3"),
        (("import", imported / "foreign-router", "--from", "router", "--source-revision", "main"), "without --source"),
        (("export", "embedded:head_local", "--to", "router"), "full-head linear maps"),
    ):
        done = run_cli("mapper", *arguments, "--out", tmp_path / "out")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), (arguments, done.stderr)
        assert message in done.stderr
        assert not (tmp_path / "out").exists()
