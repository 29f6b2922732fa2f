"""Other engines' prefills, by time to the first token: vLLM in this process, or a server that speaks the OpenAI protocol."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from kvbench.errors import BadInputError
from kvbench.pairs.models import LoadedModel
from kvbench.runs.latency import RE_PREFILL, Latency, LatencyPoint
from kvbench.timing import counted
from kvbench.timing.latency import LatencySettings, Progress
from kvbench.timing.peak import Machine
from kvbench.timing.points import judged_point

TIMEOUT_SECONDS = 600.0
BASELINES = ("transformers", "vllm")
PromptAs = Literal["tokens", "text"]


class Baseline(ABC):
    """An engine that prefills prompts it has never seen and says its first token."""

    name: str
    batches: bool = True
    """Whether it can be given several rows at once."""

    @abstractmethod
    def first_token_seconds(self, rows: Sequence[Sequence[int]]) -> float:
        """Seconds from handing over the prompts to the first token of the last row."""

    def notes(self) -> list[str]:
        """What a reader must know of the figures."""
        return []


class VllmBaseline(Baseline):
    """vLLM with prefix caching off; its time includes scheduling, sampling, and one decode step's bookkeeping.

    Args:
        target: the model whose prefill it stands for.
        longest: context tokens of the longest prompt.

    Raises:
        BadInputError: vLLM is not installed, or cannot run the model.
    """

    name = "vllm"

    def __init__(self, target: LoadedModel, longest: int) -> None:
        import_vllm()
        import torch

        vllm = import_module("vllm")

        free = 0.9
        if target.device.type == "cuda":
            available, total = torch.cuda.mem_get_info(target.device)
            free = max(0.05, 0.9 * available / total)
        try:
            self._engine: Any = vllm.LLM(
                model=target.ref.path,
                revision=target.ref.revision,
                dtype=str(target.dtype).removeprefix("torch."),
                enable_prefix_caching=False,
                max_model_len=longest + 8,
                gpu_memory_utilization=free,
            )
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise BadInputError(
                f"vLLM cannot run '{target.name}': {first}; leave --baseline vllm out, or measure a server with --baseline-url"
            ) from error
        self._sampling: Any = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def first_token_seconds(self, rows: Sequence[Sequence[int]]) -> float:
        """One `generate` of one token per row."""
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        begun = time.perf_counter()
        self._engine.generate(prompts, self._sampling, use_tqdm=False)
        return time.perf_counter() - begun

    def notes(self) -> list[str]:
        """The version."""
        from importlib.metadata import version

        return [f"baseline vllm {version('vllm')}, prefix caching off; cold figures still prefill the source with transformers"]


def import_vllm() -> None:
    """Refuse early where vLLM is missing.

    Raises:
        BadInputError: with the extra that installs it.
    """
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise BadInputError(
            "--baseline vllm, but vllm is not installed here; pip install 'kvbench[vllm]' on a machine with a supported GPU, or drop it"
        )


class ServerBaseline(Baseline):
    """A running server with `/v1/completions`, by the time to the first streamed token; the network is part of it.

    Args:
        url: base address, with or without `/v1`.
        model: the model's name there.
        prompt_as: token ids as they are, or text.

    Raises:
        BadInputError: no http address, or nothing answers as it should.
    """

    batches = False

    def __init__(self, url: str, model: str, *, prompt_as: PromptAs = "tokens") -> None:
        if not url.startswith(("http://", "https://")):
            raise BadInputError(f"--baseline-url '{url}' is no http address; give one like http://localhost:8000")
        base = url.rstrip("/")
        self._endpoint = f"{base if base.endswith('/v1') else base + '/v1'}/completions"
        self.name, self.url, self.model = f"{model} at {url}", url, model
        self._prompt_as: PromptAs = prompt_as
        self._tokenizer: Any = None
        self._counted: list[tuple[int, int]] = []

    def decode_with(self, tokenizer: Any) -> None:
        """Turn token ids into text with the target's tokenizer."""
        self._tokenizer = tokenizer

    def probe(self) -> None:
        """Ask for one token before anything expensive is begun.

        Raises:
            BadInputError: unreachable, refused, or no stream of tokens.
        """
        self._ask("Hello" if self._prompt_as == "text" else [1, 2, 3], None)

    def first_token_seconds(self, rows: Sequence[Sequence[int]]) -> float:
        """One request."""
        (row,) = rows
        return self._ask(self._tokenizer.decode(list(row)) if self._prompt_as == "text" else list(row), len(row))

    def notes(self) -> list[str]:
        """Where the server's own token counts differ from ours, and that it may run on another machine."""
        found = [f"baseline '{self.name}' is timed over its network connection; its floor is judged by this machine's peak rate"]
        if off := [(ours, theirs) for ours, theirs in self._counted if ours != theirs]:
            found.append(f"baseline '{self.name}' counted {off[0][1]} prompt tokens where {off[0][0]} were meant ({len(off)} requests differ)")
        return found

    def _ask(self, prompt: str | list[int], meant: int | None) -> float:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            self._endpoint, json.dumps(body).encode(), {"Content-Type": "application/json", "Accept": "text/event-stream"}
        )
        begun = time.perf_counter()
        seconds: float | None = None
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                for line in answer:
                    event = _event(line, self._endpoint)
                    if event is None:
                        continue
                    if seconds is None and event.get("choices"):
                        seconds = time.perf_counter() - begun
                    usage = event.get("usage")
                    if meant is not None and isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
                        self._counted.append((meant, usage["prompt_tokens"]))
        except urllib.error.HTTPError as error:
            detail = " ".join(error.read(300).decode("utf-8", "replace").split())
            raise BadInputError(
                f"'{self._endpoint}' answered {error.code} {error.reason}: {detail}; check --baseline-model and the server's log"
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise BadInputError(f"'{self._endpoint}' cannot be asked: {reason}; start the server, or check --baseline-url") from error
        if seconds is None:
            raise BadInputError(f"'{self._endpoint}' streamed no token; kvbench needs an OpenAI-compatible server whose /v1/completions streams")
        return seconds


def _event(line: bytes, endpoint: str) -> Mapping[str, Any] | None:
    """One server-sent event; None for keep-alives and the end."""
    text = line.decode("utf-8", "replace").strip()
    if not text.startswith("data:") or (payload := text[5:].strip()) == "[DONE]":
        return None
    try:
        found = json.loads(payload)
    except json.JSONDecodeError as error:
        raise BadInputError(f"'{endpoint}' streamed what is no JSON: {payload[:120]}; kvbench needs an OpenAI-compatible server") from error
    if not isinstance(found, dict) or found.get("error"):
        raise BadInputError(f"'{endpoint}' answered with an error: {str(found)[:200]}; check the server's log")
    return found


def add_baseline(found: Latency, baseline: Baseline, target: LoadedModel, settings: LatencySettings, *, progress: Progress | None = None) -> Latency:
    """Time a baseline at every length, in random order, every request with tokens of its own, so that no cache can answer.

    Args:
        found: what `measure` found; its peak rates judge the baseline.
        baseline: the engine.
        target: the model whose prefill it stands for; its sizes give the floor.
        settings: as of `measure`.
        progress: told how far it is.

    Returns:
        `found` with points 're-prefill, NAME'; a time below what the peak matrix rate allows carries an error.
    """
    size = counted.size_of(target)
    machine = Machine(target.dtype, target.device)
    machine.matrix = {rate.shape: rate for rate in found.matrix_rates}
    machine.copies = found.copy_rates
    draw = random.Random(settings.seed + 1)
    order = [(tokens, batch) for batch in settings.batch_sizes if batch == 1 or baseline.batches for tokens in settings.lengths]
    draw.shuffle(order)
    points: list[LatencyPoint] = []
    arm = f"{RE_PREFILL}, {baseline.name}"
    for done, (tokens, batch) in enumerate(order):
        if progress is not None:
            progress(done, len(order), f"{tokens:,} tokens: {baseline.name}")
        seconds = []
        for turn in range(settings.warmups + settings.repeats):
            rows = [[draw.randrange(int(target.config.vocab_size)) for _ in range(tokens)] for _ in range(batch)]
            taken = baseline.first_token_seconds(rows)
            if turn >= settings.warmups:
                seconds.append(taken)
        points.append(judged_point(arm, tokens, batch, seconds, counted.prefill(size, tokens, batch, head_positions=1), machine))
    notes = [*baseline.notes(), *(f"{p.arm} at {p.tokens:,} tokens: {p.error}" for p in points if p.error)]
    if skipped := [batch for batch in settings.batch_sizes if batch > 1 and not baseline.batches]:
        notes.append(f"baseline '{baseline.name}' is asked one row at a time; batch sizes {', '.join(map(str, skipped))} have none")
    merged = tuple(sorted((*found.points, *points), key=lambda p: (p.batch, p.tokens)))
    return found.model_copy(update={"points": merged, "notes": (*found.notes, *notes)})
