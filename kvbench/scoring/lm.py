"""`lm_eval --model kvxfer`: lm-eval's HFLM, answering from a transferred cache."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ParamSpec, TypeVar

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text, resolve_max_length

from kvbench.errors import BadInputError, KVBenchError
from kvbench.mappers.artifact import caveats
from kvbench.pairs.check import check_pair
from kvbench.pairs.gates import run_gates
from kvbench.pairs.locate import load_config, resolve
from kvbench.pairs.models import LoadedModel, load_model
from kvbench.pairs.tokenizers import tokenizer_fingerprint
from kvbench.scoring.arms import Arm, mapper_arm, own_prefill
from kvbench.scoring.carried import carried_tokens
from kvbench.scoring.engine import TransferEngine
from kvbench.scoring.generation import GenerationSettings
from kvbench.scoring.scorer import SharedScorer

log = logging.getLogger("kvbench")
P = ParamSpec("P")
R = TypeVar("R")
CACHE_MARK = "kvbench-arm"
ARMS = ("transfer", "target", "source")


def _no_traceback(method: Callable[P, R]) -> Callable[P, R]:
    """Under the lm_eval command, end with the message alone; in Python, raise."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except KVBenchError as error:
            owner = args[0]
            if isinstance(owner, type) or getattr(owner, "_from_command", False):
                print(f"kvxfer: {error}", file=sys.stderr)
                raise SystemExit(error.exit_code) from None
            raise

    return guarded


class KVTransferLM(HFLM):  # type: ignore[misc]
    """One arm as an lm-eval model.

    Args:
        pretrained: the target (lm-eval's own naming; `target=` means the same).
        source: the model that prefills.
        mapper: artifact directory, `embedded:ridge`, or a control.
        arm: `transfer`, `target` or `source`.
        hold_back: last context tokens that the answering model runs itself.
        source_revision: hub revision of the source.
        gates: check the loaded models before scoring.
        share_headers: prefill headers that contexts share once.
        allow_mismatched: take models that differ in KV heads or head width (experimental).
        **kwargs: everything else that lm-eval's `hf` takes (dtype, device, batch_size, max_length, ...).

    Raises:
        BadInputError: arguments that do not go together.
        IncompatiblePairError: the pair check refuses.
        GateError: a gate fails.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        target: str | None = None,
        source: str | None = None,
        mapper: str | None = None,
        arm: str = "transfer",
        hold_back: int | str = 1,
        source_revision: str | None = None,
        gates: bool | str = True,
        share_headers: bool | str = True,
        allow_mismatched: bool | str = False,
        **kwargs: Any,
    ) -> None:
        if pretrained and target and pretrained != target:
            raise BadInputError(f"pretrained={pretrained} and target={target} name two models; give one of them")
        target = target or pretrained
        _check_arguments(target, source, mapper, arm, kwargs)
        assert target is not None  # _check_arguments refused None
        target_ref = resolve(target, kwargs.get("revision"))
        source_ref = resolve(source, source_revision) if source else None
        if source_ref is not None:
            check_pair(
                source_ref.name,
                target_ref.name,
                source_revision=source_revision,
                target_revision=kwargs.get("revision"),
                allow_mismatched=_truth(allow_mismatched, "allow_mismatched"),
            ).raise_if_refused()
        answering = source_ref if arm == "source" and source_ref is not None else target_ref
        if arm == "source":
            kwargs["revision"] = source_revision
        if kwargs.get("revision") is None:
            kwargs.pop("revision", None)
        kwargs.setdefault("attn_implementation", "sdpa")
        dtype = str(kwargs.get("dtype", "auto")).removeprefix("torch.")
        try:
            super().__init__(pretrained=answering.path, **({"gguf_file": answering.gguf_file} if answering.gguf_file else {}), **kwargs)
        except (OSError, ValueError, TypeError, RuntimeError, AssertionError) as error:
            raise BadInputError(
                f"cannot load '{answering.name}': {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
            ) from error
        loaded = LoadedModel(self.model, self.tokenizer, answering)
        models: dict[str, LoadedModel | None] = {"source": None, "target": None}
        models["source" if arm == "source" else "target"] = loaded
        if source_ref is not None and arm == "transfer":
            models["source"] = load_model(
                source_ref.name,
                revision=source_revision,
                dtype=dtype,
                device=str(self.device),
                attention=str(kwargs["attn_implementation"]),
                device_map="auto" if kwargs.get("parallelize") else None,
                trust_remote_code=bool(kwargs.get("trust_remote_code")),
            )
        chosen = self._arm(arm, mapper, models)
        for name, told in caveats(chosen.manifest or {}).items():
            log.warning("kvxfer: mapper '%s': %s: %s", chosen.name, name, told)
        if _truth(gates, "gates"):
            run_gates(models["source"], models["target"]).raise_if_failed()
        other = target_ref if arm == "source" else source_ref
        limits = [self.max_length]
        if other is not None and not self._max_length:
            limits.append(int(resolve_max_length(load_config(other), self.tokenizer, default=self._DEFAULT_MAX_LENGTH)))
        engine = TransferEngine(
            models["source"],
            models["target"],
            [chosen],
            hold_back=_whole(hold_back, "hold_back"),
            share_headers=_truth(share_headers, "share_headers"),
        )
        self._adopt(
            SharedScorer(engine, batch_size=self.batch_size, max_length=min(limits)),
            chosen,
            (target_ref.name, source_ref.name if source_ref else None, mapper, hold_back),
        )

    @staticmethod
    def _arm(arm: str, mapper: str | None, models: dict[str, LoadedModel | None]) -> Arm:
        source, target = models["source"], models["target"]
        if arm == "source":
            assert source is not None
            return own_prefill("source", source)
        assert target is not None
        if arm == "target":
            return own_prefill("target", target)
        assert source is not None
        assert mapper is not None
        return mapper_arm(mapper, source, target)

    @classmethod
    def from_scorer(cls, scorer: SharedScorer, arm: Arm, identity: Sequence[Any] = ()) -> KVTransferLM:
        """An lm-eval model over a scorer that other arms share; nothing is loaded."""
        lm = cls.__new__(cls)
        model = scorer.engine.models[arm.answering]
        logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it warns about a pre-built model, which is what we mean
        HFLM.__init__(lm, pretrained=model.model, tokenizer=model.tokenizer, batch_size=1)
        lm._adopt(scorer, arm, identity)
        lm._shared = True
        return lm

    def _adopt(self, scorer: SharedScorer, arm: Arm, identity: Sequence[Any]) -> None:
        self.scorer, self.arm = scorer, arm
        self._max_length = scorer.max_length
        self._cache_identity = json.dumps([arm.name, arm.answering, *map(str, identity)])

    @classmethod
    @_no_traceback
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> KVTransferLM:
        """As lm-eval calls it from `--model_args a=b,c=d`."""
        lm: KVTransferLM = super().create_from_arg_string(arg_string, additional_config)
        lm._from_command = True
        return lm

    @classmethod
    @_no_traceback
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> KVTransferLM:
        """As lm-eval calls it from parsed arguments."""
        lm: KVTransferLM = super().create_from_arg_obj(arg_dict, additional_config)
        lm._from_command = True
        return lm

    _from_command = False
    _shared = False
    _tokenizer_fingerprint: str | None = None

    def _create_model(self, pretrained: str, gguf_file: str | None = None, dtype: Any = "auto", **kwargs: Any) -> None:
        """As lm-eval does, but a GGUF file is unpacked, so that the asked dtype is the computing dtype."""
        if gguf_file is None:
            super()._create_model(pretrained=pretrained, gguf_file=gguf_file, dtype=dtype, **kwargs)
            return
        self._model = load_model(f"{pretrained}/{gguf_file}", dtype=str(dtype).removeprefix("torch."), device=str(self.device)).model

    @_no_traceback
    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse a response cache that another arm filled: lm-eval's keys do not contain the model."""
        stored = getattr(cache_hook, "dbdict", None)
        if stored is not None:
            mark = stored.get(CACHE_MARK)
            if mark is None and len(stored):
                raise BadInputError("the file given to --use_cache holds answers of an unknown model; give each arm a file of its own")
            if mark is not None and mark != self._cache_identity:
                raise BadInputError(
                    f"the file given to --use_cache holds answers of another arm ({mark}), not of {self._cache_identity}; give each arm a file of its own"
                )
            stored[CACHE_MARK] = self._cache_identity
        super().set_cache_hook(cache_hook)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **kwargs: Any) -> list[int]:
        """As lm-eval does; arms that share a scorer share the work."""
        if not self._shared or kwargs:
            plain: list[int] = super().tok_encode(string, add_special_tokens, left_truncate_len, **kwargs)
            return plain
        key = (string, add_special_tokens, left_truncate_len)
        if key not in self.scorer.encoded:
            self.scorer.encoded[key] = super().tok_encode(string, add_special_tokens, left_truncate_len)
        return self.scorer.encoded[key]

    @_no_traceback
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As lm-eval does, but items that carry their token ids (prefix perplexity) are scored on exactly those."""
        carried = [carried_tokens(r.doc, r.args[0], fingerprint=self._fingerprint, max_length=self.max_length) for r in requests]
        as_text = [request for request, ids in zip(requests, carried, strict=True) if ids is None]
        as_ids = [(request.args, *ids) for request, ids in zip(requests, carried, strict=True) if ids is not None]
        quiet = disable_tqdm or self._shared
        from_text = iter(super().loglikelihood(as_text, disable_tqdm=quiet) if as_text else [])
        from_ids = iter(self._loglikelihood_tokens(as_ids, disable_tqdm=quiet) if as_ids else [])
        return [next(from_text) if ids is None else next(from_ids) for ids in carried]

    def _fingerprint(self) -> str:
        if self._tokenizer_fingerprint is None:
            self._tokenizer_fingerprint = tokenizer_fingerprint(self.tokenizer)
        return self._tokenizer_fingerprint

    @_no_traceback
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score tokenised requests through the transfer."""
        empty = next((text for text, _, continuation in requests if not continuation), None)
        if empty is not None:
            raise BadInputError(f"the continuation {empty[1]!r} has no tokens of its own behind its context; change the task's target_delimiter")
        scores = self.scorer.loglikelihoods(self.arm.name, [(tuple(context), tuple(continuation)) for _, context, continuation in requests])
        answers = [(score.logprob, score.greedy) for score in scores]
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        self._report()
        return answers

    @_no_traceback
    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Rolling perplexity: there is no prefix to transfer, so only arms `target` and `source` have it."""
        if self.arm.transfers:
            names = ", ".join(sorted({str(r.task_name) for r in requests}))
            raise BadInputError(
                f"task {names} asks for rolling perplexity, which has no prefix to transfer; use 'wikitext2_prefix' (or 'tiny_prefix' for the embedded family), or arm=target / arm=source"
            )
        answers: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return answers

    @_no_traceback
    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate through the transfer; arguments and stop strings as for `hf`."""
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        prepared = []
        for request in requests:
            context, kwargs = request.args
            if not isinstance(kwargs, dict):
                raise BadInputError(f"generation arguments are a {type(kwargs).__name__}, not a mapping; check the task's generation_kwargs")
            arguments = normalize_gen_kwargs(kwargs, self.max_gen_toks)
            stop = handle_stop_sequences(arguments.pop("until", None), eos=eos)
            budget = int(arguments.pop("max_gen_toks"))
            arguments.pop("max_length", None)
            prepared.append((tuple(self.tok_encode(context)), GenerationSettings.from_kwargs(arguments, budget, stop)))
        generated = self.scorer.generations(self.arm.name, prepared)
        answers = []
        for request, (_, settings), tokens in zip(requests, prepared, generated, strict=True):
            answers.append(self._as_text(tokens, settings))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        self._report()
        return answers

    def _as_text(self, tokens: list[int], settings: GenerationSettings) -> str:
        if isinstance(self.think_end_token, int) and self.think_end_token in tokens:
            last = len(tokens) - 1 - tokens[::-1].index(self.think_end_token)
            text = self.tok_decode(tokens[last + 1 :]).lstrip()
        else:
            text = self.tok_decode(tokens)
        marker = self.think_end_token if isinstance(self.think_end_token, str) else None
        return str(postprocess_generated_text(generation=text, stop=list(settings.stop), think_end_token=marker))

    def _report(self) -> None:
        costs = self.scorer.engine.costs
        if costs.too_short and self.arm.transfers:
            log.warning(
                "kvxfer: %d of %d contexts have at most hold_back=%d tokens: nothing was transferred for them",
                costs.too_short,
                costs.contexts,
                self.scorer.engine.hold_back,
            )
        if costs.truncated:
            log.warning("kvxfer: %d contexts were cut on the left to fit %d positions", costs.truncated, self.max_length)

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's model information, and what the transfer did."""
        info: dict[str, Any] = super().get_model_info()
        info["kvxfer"] = {
            "arm": self.arm.name,
            "answering": self.arm.answering,
            "hold_back": self.scorer.engine.hold_back,
            "max_length": self.max_length,
            **asdict(self.scorer.engine.costs),
        }
        return info


def _check_arguments(target: str | None, source: str | None, mapper: str | None, arm: str, kwargs: dict[str, Any]) -> None:
    if not target:
        raise BadInputError("no target: give pretrained=TARGET (a hub id, a directory, a GGUF file or embedded:target)")
    if arm not in ARMS:
        raise BadInputError(f"arm={arm} is unknown; it is one of {', '.join(ARMS)}")
    if arm != "target" and not source:
        raise BadInputError(f"arm={arm} needs source=SOURCE, the model that prefills")
    if arm == "transfer" and not mapper:
        raise BadInputError(
            "arm=transfer needs mapper=DIRECTORY or a control (identity, oracle, zero, raw, random, shuffled); fit one with 'kvbench fit'"
        )
    if arm != "transfer" and mapper:
        raise BadInputError(f"arm={arm} uses no mapper, but mapper={mapper} was given; drop one of them")
    for name in ("peft", "delta", "autogptq", "tp_plan"):
        if kwargs.get(name):
            raise BadInputError(
                f"{name}={kwargs[name]} is not supported by kvxfer: the fitted map would not fit the changed model; merge it into a checkpoint first"
            )


def _truth(value: bool | str, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in {"true", "1", "yes", "false", "0", "no"}:
        return str(value).lower() in {"true", "1", "yes"}
    raise BadInputError(f"{name}={value} is neither true nor false")


def _whole(value: int | str, name: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise BadInputError(f"{name}={value} is not a whole number") from error
