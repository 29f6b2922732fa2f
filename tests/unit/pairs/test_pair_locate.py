"""From a name to a model, and one clear message for everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pair_models import SaveModel, byte_tokenizer, llama

from kvbench.errors import BadInputError
from kvbench.pairs.locate import ModelRef, load_config, load_tokenizer, resolve


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model-1.5_x") == ModelRef("org/model-1.5_x", "org/model-1.5_x")
    assert resolve("gpt2", "abc123") == ModelRef("gpt2", "gpt2", revision="abc123")


def test_directories_and_gguf_files(save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model()
    assert resolve(folder) == ModelRef(folder, folder)
    assert resolve(folder, "main").revision is None
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "w.gguf")) == ModelRef(str(tmp_path / "w.gguf"), str(tmp_path), "w.gguf")
    monkeypatch.chdir(tmp_path)
    assert resolve("w.gguf").path == "."
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model").path == folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("./nowhere", "no directory or file './nowhere'"),
        ("../nowhere", "no directory or file"),
        ("~/nowhere-at-all", "no directory or file"),
        ("/nowhere/at-all", "no directory or file '/nowhere/at-all'"),
        ("a/b/c", "no directory or file 'a/b/c'"),
        ("model.gguf", "no directory or file 'model.gguf'"),
        ("not a model", "neither an existing path nor a hub id"),
        ("org/mo:del", "neither an existing path nor a hub id"),
        ("embedded:sorce", "embedded:source, embedded:target, embedded:stranger"),
        ("x" * 5000 + "/../y", "no directory or file"),
    ],
)
def test_names_that_lead_nowhere(name: str, words: str) -> None:
    with pytest.raises(BadInputError) as raised:
        resolve(name)
    assert words in str(raised.value)


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"has no config\.json, so it is no model; give the directory that save_pretrained wrote"):
        resolve(str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(BadInputError, match=r"give the GGUF file itself, for instance .*weights\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(BadInputError, match=r"is a file but no \.gguf file"):
        resolve(str(tmp_path / "notes.txt"))


def test_revision_of_a_local_model_is_refused(save_model: SaveModel) -> None:
    with pytest.raises(BadInputError, match=r"revision 'v2' is given for .* which is local"):
        resolve(save_model(), "v2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{not json", "is not a readable JSON file"),
        ("\udcff", "is not a readable JSON file"),
        ("[]", "states no model_type"),
        ("{}", "states no model_type"),
        ('{"model_type": "llamma"}', "model_type 'llamma' is unknown to transformers"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "c.C"}}', "needs code from its own repository; read that code, then allow it"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}', "factor"),
    ],
)
def test_unusable_configurations(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInputError) as raised:
        load_config(resolve(str(tmp_path)))
    assert words in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_code_of_the_repository_runs_only_when_trusted(tmp_path: Path) -> None:
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}, "width": 3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    code = "from transformers import PretrainedConfig\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n    width: int = 0\n"
    (tmp_path / "configuration_own.py").write_text(code)
    with pytest.raises(BadInputError, match="trust_remote_code=True"):
        load_config(resolve(str(tmp_path)))
    assert load_config(resolve(str(tmp_path)), trust_remote_code=True).width == 3


def test_missing_and_damaged_tokenizers(save_model: SaveModel) -> None:
    ref = resolve(save_model(with_tokenizer=False))
    with pytest.raises(BadInputError, match="has no tokenizer"):
        load_tokenizer(ref)
    for content in ("{bad", '{"version": "1.0"}', '{"version": "1.0", "added_tokens": [], "model": {"type": "Nonsense"}}'):
        Path(ref.path, "tokenizer.json").write_text(content)
        with pytest.raises(BadInputError, match="cannot read the tokenizer of"):
            load_tokenizer(ref)
    byte_tokenizer().save_pretrained(ref.path)
    assert load_tokenizer(ref).encode("the") == byte_tokenizer().encode("the")


def test_a_file_that_only_claims_to_be_gguf(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"not at all")
    with pytest.raises(BadInputError, match="cannot read the configuration of"):
        load_config(resolve(str(tmp_path / "w.gguf")))


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'kvbench\[gguf\]'"):
        load_config(resolve(str(tmp_path / "w.gguf")))


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does where a model cannot be had."""

    def do_GET(self) -> None:
        code, error = next(answer for part, answer in ANSWERS.items() if part in self.path)
        body = b'{"error": "no"}' if error else json.dumps({"id": "org/locked", "modelId": "org/locked", "sha": "0" * 40, "tags": []}).encode()
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_args: object) -> None:
        pass


ANSWERS = {
    "models/org/locked": (200, ""),  # what a gated repository is may be seen by all; its files may not
    "org/locked/resolve": (403, "GatedRepo"),
    "models/org/unknown": (401, "RepoNotFound"),
    "models/org/old": (404, "RevisionNotFound"),
    "": (500, "ServerError"),
}


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


ASK = """
import sys
from kvbench.errors import BadInputError
from kvbench.pairs.locate import load_config, load_tokenizer, resolve
for name in sys.argv[1:]:
    repository, _, revision = name.partition("@")
    for load in (load_config, load_tokenizer):
        try:
            print("loaded", type(load(resolve(repository, revision or None))).__name__)
        except BadInputError as error:
            print(error)
"""


def ask(names: list[str], home: Path, **environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()}
    variables = {**kept, "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", ASK, *names], capture_output=True, text=True, check=True, env=variables, cwd=home)
    return done.stdout.splitlines()


def test_hub_answers_become_messages(tmp_path: Path) -> None:
    with hub() as endpoint:
        lines = ask(["org/locked", "org/unknown", "org/old@v9", "org/broken"], tmp_path, HF_ENDPOINT=endpoint)
    assert len(lines) == 8
    for line, words in zip(
        lines[::2], ("is gated on the hub; accept its terms", "nor a model on the hub", "has no revision 'v9'", "hub cannot be reached"), strict=True
    ):
        assert words in line
    assert "is gated on the hub" in lines[1]


def test_unreachable_hub_names_the_remedy_without_retrying(tmp_path: Path) -> None:
    # Port 9 (discard) of this machine refuses: the same as no network, without waiting for one.
    lines = ask(["org/model"], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("'org/model' is no local path, the hub cannot be reached (ConnectError")
        assert "hf download org/model --local-dir DIR" in line


@pytest.mark.parametrize("variables", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}], ids=["unreachable", "offline"])
def test_models_in_the_local_cache_need_no_hub(variables: dict[str, str], tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--model"
    commit = "a" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    llama().save_pretrained(cached / "snapshots" / commit)
    byte_tokenizer().save_pretrained(cached / "snapshots" / commit)
    lines = ask(["org/model", "org/other"], tmp_path, **variables)
    assert lines[0] == "loaded LlamaConfig"
    assert lines[1].startswith("loaded ")
    assert all("not in the local cache" in line for line in lines[2:])
