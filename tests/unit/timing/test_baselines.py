"""The OpenAI-compatible baseline against a small local server that streams server-sent events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from kvbench.errors import BadInputError
from kvbench.runs.latency import Latency, MatrixRate
from kvbench.timing.baselines import Baseline, ServerBaseline, add_baseline, import_vllm
from kvbench.timing.latency import LatencySettings

TOKEN = {"choices": [{"index": 0, "text": " a"}]}


@contextmanager
def server(events: list[Any] | None = None, *, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers every completion with these events (None: one token, usage, the end); yields its address and the requests it saw."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, **body})
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            if status != 200:
                self.wfile.write(b'{"error": {"message": "the model `x` does not exist"}}')
                return
            usage = {"choices": [], "usage": {"prompt_tokens": len(body["prompt"])}}
            for event in events if events is not None else [TOKEN, usage, "[DONE]"]:
                text = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f": keep-alive\n\ndata: {text}\n\n".encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}", seen
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def _found(rate: float = 1e6) -> Latency:
    return Latency(device="made up", points=(), matrix_rates=(MatrixRate(shape=(1, 1, 1), what="made up", operations_per_second=rate),))


def test_every_request_is_a_prompt_never_seen(tiny):
    settings = LatencySettings(lengths=(8, 32), batch_sizes=(1, 4), warmups=1, repeats=3)
    with server() as (url, seen):
        baseline = ServerBaseline(url, "big")
        baseline.probe()
        # A rate so high that no time is below its floor.
        found = add_baseline(_found(1e15), baseline, tiny(), settings)
    asked = [request for request in seen if request["prompt"] != [1, 2, 3]]
    assert len(asked) == 2 * 4
    assert sorted(len(request["prompt"]) for request in asked) == [8] * 4 + [32] * 4
    assert len({tuple(request["prompt"][:8]) for request in asked}) == 8
    assert all((r["path"], r["model"], r["max_tokens"], r["stream"]) == ("/v1/completions", "big", 1, True) for r in asked)
    assert {(p.arm, p.tokens, p.batch, len(p.seconds)) for p in found.points} == {(f"re-prefill, big at {url}", n, 1, 3) for n in (8, 32)}
    assert not any(p.error for p in found.points)
    assert any("batch sizes 4 have none" in note for note in found.notes)


def test_a_time_below_the_floor_is_flagged_and_told(tiny):
    class CacheHit(Baseline):
        name = "cheat"

        def first_token_seconds(self, rows: Any) -> float:
            return 1e-6

    found = add_baseline(_found(), CacheHit(), tiny(), LatencySettings(lengths=(64,), warmups=0, repeats=2))
    assert "below the floor" in (found.points[0].error or "")
    assert any("cheat at 64 tokens" in note for note in found.notes)


def test_text_prompts_and_token_counts_that_differ(tiny):
    model = tiny()
    with server() as (url, seen):
        baseline = ServerBaseline(url + "/v1/", "big", prompt_as="text")
        baseline.decode_with(model.tokenizer)
        add_baseline(_found(1e15), baseline, model, LatencySettings(lengths=(8,), warmups=0, repeats=1))
    assert isinstance(seen[0]["prompt"], str)
    # The made-up server counts characters as tokens.
    assert any("prompt tokens where 8 were meant" in note for note in baseline.notes())


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        (None, 404, r"answered 404 .*the model `x` does not exist.*--baseline-model"),
        (["[DONE]"], 200, "streamed no token"),
        (["<html>"], 200, "what is no JSON: <html>"),
        ([{"error": {"message": "overloaded"}}], 200, "overloaded"),
    ],
)
def test_what_a_server_can_answer_wrongly(events, status, message):
    with server(events, status=status) as (url, _), pytest.raises(BadInputError, match=message):
        ServerBaseline(url, "x").probe()


def test_no_server_and_no_address():
    with server() as (url, _):
        pass
    with pytest.raises(BadInputError, match=r"cannot be asked: .*start the server, or check --baseline-url"):
        ServerBaseline(url, "x").probe()
    with pytest.raises(BadInputError, match="'localhost:8000' is no http address"):
        ServerBaseline("localhost:8000", "x")


def test_vllm_missing_is_one_message(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'kvbench\[vllm\]'"):
        import_vllm()


def test_vllm_is_asked_without_prefix_caching(tiny, monkeypatch):
    """Against a stand-in: vLLM itself cannot run here."""
    import sys
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from kvbench.timing import baselines

    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, **settings: Any) -> None:
            asked.update(settings)

        def generate(self, prompts: Any, sampling: Any, *, use_tqdm: bool) -> None:
            asked["prompts"], asked["sampling"] = prompts, sampling

    fake = ModuleType("vllm")
    fake.__spec__ = ModuleSpec("vllm", None)
    fake.LLM, fake.SamplingParams = LLM, lambda **settings: settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    made = baselines.VllmBaseline(tiny(dtype=torch.float32), 64)
    assert made.first_token_seconds([[1, 2], [3, 4]]) > 0
    assert asked["enable_prefix_caching"] is False
    assert asked["prompts"] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3, 4]}]
    assert asked["sampling"]["max_tokens"] == 1
