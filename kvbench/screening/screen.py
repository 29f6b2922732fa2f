"""`kvbench screen`: from a new pair to a verdict, stage by stage, stopping at the first that settles the matter."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ArtifactError, BadInputError
from kvbench.pairs.check import PairReport, check_pair
from kvbench.pairs.gates import GateReport, run_gates
from kvbench.pairs.models import LoadedModel, load_model
from kvbench.pairs.pins import pin
from kvbench.reporting.comparison import Compared, compare
from kvbench.reporting.report import write_report
from kvbench.reporting.screened import write_verdict_page
from kvbench.runs import load_runs
from kvbench.runs.files import read_stored, write_stored
from kvbench.runs.provenance import collect, command_line
from kvbench.runs.verdict import Criterion, Side, Signature, StageRecord, Verdict
from kvbench.scoring.arms import Arm, artifact_path
from kvbench.scoring.taskfiles import find_definitions
from kvbench.screening import criteria, stages
from kvbench.screening.decide import decide
from kvbench.screening.request import Request, Talk, scores_text
from kvbench.screening.verify import MAPPER, SPEC, VERDICT, mapper_id
from kvbench.storage import dump_json, read_manifest, utc_now, write_atomic

STAGES = ("check", "gates", "calibrate", "fit", "diagnose", "canary", "suite", "timing")
RECORDS = "stages.json"
CONTROL_MAPPERS = ("random", "zero", "raw", "identity")


@dataclass
class _State:
    """What is known so far."""

    criteria: list[Criterion] = field(default_factory=list)
    records: list[StageRecord] = field(default_factory=list)
    settled: str | None = None
    models: tuple[LoadedModel, LoadedModel] | None = None
    report: PairReport | None = None
    mapper: Path | str | None = None
    name: str = "mapper"
    compared: Compared | None = None
    data: dict[str, Any] = field(default_factory=dict)


class Screen:
    """One screen in one directory.

    Args:
        request: what is asked for.
        out: directory; an unfinished screen of the same request goes on.
        talk: progress.

    Raises:
        BadInputError: another screen lies there, or something that can be refused before any model is loaded.
    """

    def __init__(self, request: Request, out: Path, talk: Talk) -> None:
        self.request, self.out, self.talk = request, out, talk
        self.policy, self.budget = request.policy, request.budget
        self.state = _State()
        self.started = utc_now()
        defined = find_definitions(list(request.tasks), list(request.include)).leaves
        self.leaves = list(defined)
        self.canary = criteria.canary_of(self.policy, self.leaves)
        self.texts = [name for name, leaf in defined.items() if scores_text(leaf)]
        self.answered = [name for name in self.leaves if name not in (self.canary, *self.texts)]
        self._open()
        self._seconds: dict[str, float] = {}
        if (out / RECORDS).is_file():
            self._seconds = _read_json(out / RECORDS)

    def _open(self) -> None:
        file, spec = self.out / SPEC, dump_json(self.request.spec())
        if file.is_file():
            stored = _read_json(file)
            asked = json.loads(spec)
            differing = [key for key in asked if stored.get(key) != asked[key]]
            if differing:
                key, was, now = differing[0], stored.get(differing[0]), asked[differing[0]]
                if isinstance(was, dict) and isinstance(now, dict):
                    part = next(name for name in now if was.get(name) != now[name])
                    key, was, now = f"{key} ({part})", was.get(part), now[part]
                raise BadInputError(
                    f"'{self.out}' holds a screen with another {key.replace('_', ' ')} ({was} instead of {now}); "
                    "choose another --out, or pass --overwrite to begin again"
                )
            self.talk.say(f"going on with the screen in '{self.out}'")
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise BadInputError(f"'{self.out}' exists and holds no screen; choose another --out")
        write_atomic(file, spec)

    def run(self) -> Verdict:
        """All stages until one settles the matter; writes verdict.json and the report. A finished screen is read again.

        Raises:
            BadInputError: what only shows while a stage is at work; a screen that had nothing yet leaves nothing behind.
        """
        if (self.out / VERDICT).is_file() and (self.out / "report").is_dir():
            self.talk.say(f"the screen in '{self.out}' is finished already; nothing to do")
            return read_stored(self.out / VERDICT, Verdict)
        try:
            return self._stages()
        except BadInputError:
            if {p.name for p in self.out.iterdir()} <= {SPEC, RECORDS}:
                shutil.rmtree(self.out)
            raise

    def _stages(self) -> Verdict:
        work = {
            "check": self._check,
            "gates": self._gates,
            "calibrate": self._calibrate,
            "fit": self._fit,
            "diagnose": self._diagnose,
            "canary": self._canary,
            "suite": self._suite,
            "timing": self._timing,
        }
        for stage in STAGES:
            if self.state.settled is not None:
                self.state.records.append(StageRecord(name=stage, state="not reached"))
                continue
            clock = time.perf_counter()
            note = work[stage]()
            # A stage that an earlier call finished took its time then.
            seconds = max(time.perf_counter() - clock, self._seconds.get(stage, 0.0))
            self._seconds[stage] = round(seconds, 2)
            write_atomic(self.out / RECORDS, dump_json(self._seconds))
            failed = [c for c in self.state.criteria if c.stage == stage and c.required and c.passed is False]
            if failed:
                self.state.settled = stage
            self.state.records.append(StageRecord(name=stage, state="settled" if failed else "done", seconds=self._seconds[stage], note=note))
            self.talk.say(f"{stage:<9} {seconds:6.1f} s  {note}")
        return self._finish()

    def _check(self) -> str:
        r = self.request
        report = check_pair(
            r.source,
            r.target,
            source_revision=r.source_revision,
            target_revision=r.target_revision,
            allow_mismatched=r.allow_mismatched,
            trust_remote_code=r.trust_remote_code,
        )
        self.state.report = report
        reason = (
            "; ".join(str(row) for row in report.refused)
            or f"{sum(row.status == 'ok' for row in report.rows)} of {len(report.rows)} properties in order"
        )
        self.state.criteria.append(_fact("check.pair", "check", "source and target can exchange a cache", report.compatible, reason))
        warned = [row.name for row in report.rows if row.status == "warn"]
        if not report.compatible:
            return reason
        return "compatible" + (f", to bear in mind: {', '.join(warned)}" if warned else "")

    def _gates(self) -> str:
        r = self.request
        loaded = [
            load_model(
                name,
                revision=revision,
                dtype=r.dtype,
                device=r.device,
                attention=r.attention,
                device_map=r.device_map,
                trust_remote_code=r.trust_remote_code,
            )
            for name, revision in ((r.source, r.source_revision), (r.target, r.target_revision))
        ]
        self.state.models = loaded[0], loaded[1]
        outcome: GateReport = run_gates(*self.state.models)
        for result in outcome.results:
            bound: Literal["at least", "at most"] = "at least" if result.gate == "zero" else "at most"
            self.state.criteria.append(
                Criterion(
                    id=f"gate.{result.gate}.{'source' if result.model == r.source else 'target'}",
                    stage="gates",
                    what=f"gate {result.gate} of {result.model}",
                    required=True,
                    relation=bound,
                    threshold=result.bound,
                    figure=result.figure,
                    unit=result.unit,
                    passed=result.passed,
                    reason=f"{result.figure:.3g} {result.unit}, {bound} {result.bound:.3g}" + ("" if result.passed else f": {result.cause}"),
                )
            )
        return f"{sum(result.passed for result in outcome.results)} of {len(outcome.results)} passed"

    def _calibrate(self) -> str:
        assert self.state.models is not None
        if self.request.mapper is not None:
            return "not needed: the mapper is given"
        reach = min(int(m.config.max_position_embeddings) for m in self.state.models)
        seq_len = min(self.budget.seq_len, reach)
        blocks, name = stages.blocks_of(self.request.data, self.state.models[1].tokenizer, self.budget, seq_len, self.request.seed)
        step = self.talk.step("calibrating", "tokens")
        self.calibration = stages.calibrate(self.state.models, blocks, name, self.budget, self.request.seed, self.out / "moments", step)
        self.state.data["calibration"] = self.calibration.manifest["data"]
        return f"{self.budget.sequences} sequences of {seq_len} tokens of {name}, {self.budget.heldout} held out"

    def _fit(self) -> str:
        assert self.state.models is not None
        given = self.request.mapper
        if given is not None:
            control = given in CONTROL_MAPPERS
            self.state.name = given if control else Path(given).name.replace(":", "-")
            self.state.mapper = given if control else self.out / MAPPER
            if not control and not (self.out / MAPPER).exists():
                shutil.copytree(artifact_path(given), self.out / MAPPER)
            return f"{given} as given"
        found = stages.fit(self.state.models, self.calibration, self.budget, self.out / "candidates", self.talk.step("fitting", "recipes"))
        best = found[0]
        if not (self.out / MAPPER).exists():
            shutil.copytree(best.path, self.out / MAPPER)
        self.state.mapper, self.state.name = self.out / MAPPER, best.name
        others = ", ".join(f"{c.name} {c.kl_nats:.3f}" for c in found[1:])
        return f"{best.name}: least KL on the choosing half of the held-out text, {best.kl_nats:.3f} nats/token" + (f" ({others})" if others else "")

    @property
    def _arms(self) -> list[Arm]:
        assert self.state.models is not None
        assert self.state.mapper is not None
        if not hasattr(self, "_made_arms"):
            self._made_arms = stages.arms_of(self.state.models, self.state.mapper, self.state.name)
        return self._made_arms

    def _diagnose(self) -> str:
        assert self.state.models is not None
        reach = min(int(m.config.max_position_embeddings) for m in self.state.models)
        found = stages.diagnosed(
            self.state.models,
            self._arms,
            self.state.name,
            None if self.request.mapper is not None else self.calibration,
            self.request.data,
            min(self.budget.seq_len, reach),
            self.budget,
            self.out,
            self.talk.step("diagnosing", "sequences"),
        )
        self.state.criteria += criteria.diagnostics(found, self.state.name, self.policy)
        shown = [(name, found.figure(self.state.name, name)) for name in ("attention_cosine_native", "kl_nats", "top1_agreement")]
        figures = ", ".join(
            f"{name.replace('_', ' ')} {figure.value:.3f}" for name, figure in shown if figure is not None and figure.value is not None
        )
        source = found.figure("source", "top1_agreement")
        return figures + (f" (the source itself {source.value:.3f})" if source is not None and source.value is not None else "")

    def _evaluate(self, tasks: list[str], folder: str, limit: int | None, arms: Sequence[Arm]) -> Path:
        assert self.state.models is not None
        r = self.request
        store = stages.evaluated(
            self.state.models,
            arms,
            self.state.name,
            # Seen from the run: a screen that was moved, or is called from elsewhere, goes on all the same.
            f"../{MAPPER}" if isinstance(self.state.mapper, Path) else str(self.state.mapper),
            tasks,
            self.out / folder,
            limit=limit,
            data_dir=r.data_dir,
            include=r.include,
            metadata={"pretrained": r.target, "source": r.source, "prefix_tokens": self.budget.text_prefix},
            seed=1234 + r.seed,
            hold_back=r.hold_back,
            bar=self.talk.scoring,
            say=self.talk.say,
        )
        return store.path

    def _canary(self) -> str:
        if self.canary is None:
            if self.policy.canary.tasks:
                what = "a task whose chains of thought break first keeps the target's score"
                reason = f"none of {', '.join(self.policy.canary.tasks)} is among the tasks"
                self.state.criteria.append(criteria.missing("canary", "canary", what, "at least", self.policy.canary.retention, reason, unit="%"))
                return reason
            return "not asked for by the policy"
        # Without the controls: on a broken cache a model rarely stops, and the canary would mostly wait for them.
        run = self._evaluate([self.canary], "canary", self.budget.canary_limit, self._arms[:3])
        compared = compare(load_runs(run), self.policy.comparison())
        found = [
            c
            for c in criteria.quality(compared.comparison, self.state.name, self.policy, stage="canary", canary=self.canary)
            if c.id.startswith("canary")
        ]
        self.state.criteria += found
        self.state.compared = compared
        return f"{self.canary}: {found[0].reason}"

    def _suite(self) -> str:
        runs = [self.out / "canary"] if self.canary is not None else []
        for folder, tasks, limit in (("run", self.answered, self.budget.limit), ("text", self.texts, self.budget.text_limit)):
            if tasks:
                runs.append(self._evaluate(tasks, folder, limit, self._arms))
        if not runs:
            raise BadInputError("no task to evaluate; name one or more with --tasks")
        tried = [arm.name for arm in self._arms[:3]]
        compared = compare([run for path in runs for run in load_runs(path)], self.policy.comparison(), arms=tried)
        found = criteria.quality(compared.comparison, self.state.name, self.policy, stage="suite", canary=self.canary)
        if self._one_model():
            # Nothing beats itself; what there is to gain is asked when it is known what the transfer costs.
            found = [c for c in found if not c.id.startswith("better_than_source")]
        self.state.criteria += [c for c in found if not c.id.startswith("canary")]
        verdict = next(v for v in compared.comparison.verdicts if v.arm == self.state.name)
        return verdict.sentence

    def _timing(self) -> str:
        assert self.state.models is not None
        reach = min(int(m.config.max_position_embeddings) for m in self.state.models)
        lengths = [length for length in (self.request.lengths or self.policy.speed.lengths) if length <= reach] or [reach]
        beyond = [length for length in (self.request.lengths or self.policy.speed.lengths) if length > reach]
        step = self.talk.step("timing", "pieces")
        arm = next(arm for arm in self._arms if arm.name == self.state.name)
        found = stages.timed(
            self.state.models, arm, lengths, self.budget, self.out, self.request.hold_back, lambda done, total, _what: step(done, total)
        )
        self.state.criteria += criteria.speed(found, self.state.name, self.policy, lengths)
        if self._one_model():
            point = found.point(self.state.name, lengths[-1])
            cost = f"{1000 * point.p50_seconds:.1f} ms at {lengths[-1]:,} tokens" if point is not None else "its time"
            reason = f"source and target are the same model: its own cache can be used as it is, and the transfer only adds {cost}"
            self.state.criteria.append(_fact("gain.other_model", "timing", "there is something to gain", False, reason))
        gains = []
        for length in lengths:
            warm, cold = (found.speedup(self.state.name, length, cold=c) for c in (False, True))
            if warm is not None and cold is not None:
                gains.append(f"{length:,} tokens: {warm.value:.2f}x warm, {cold.value:.2f}x cold")
        left_out = f"; left out, beyond {reach:,} positions: {', '.join(map(str, beyond))}" if beyond else ""
        return "; ".join(gains) + left_out

    def _one_model(self) -> bool:
        assert self.state.models is not None
        first, second = (pin(model)["weights_fingerprint"] for model in self.state.models)
        return bool(first == second)

    def _signature(self) -> Signature:
        sides = []
        prints = self.state.report.fingerprints if self.state.report is not None else {}
        for i, (role, name) in enumerate((("source", self.request.source), ("target", self.request.target))):
            if self.state.models is None:
                sides.append(Side(name=name, config_fingerprint=prints.get(f"{role}_config"), tokenizer_fingerprint=prints.get(f"{role}_tokenizer")))
                continue
            p = pin(self.state.models[i])
            shape = {key: p["geometry"][key] for key in ("layers", "kv_heads", "head_dim")}
            kept = {
                key: p[key] for key in ("revision", "config_fingerprint", "weights_fingerprint", "tokenizer_fingerprint", "files", "dtype", "rope")
            }
            sides.append(Side(name=name, **kept, **shape))
        signature = Signature(source=sides[0], target=sides[1], hold_back=self.request.hold_back)
        artifact = self.out / MAPPER
        if not artifact.is_dir():
            return signature
        manifest = read_manifest(artifact, "mapper")
        return signature.model_copy(
            update={"mapper": MAPPER, "mapper_id": mapper_id(artifact), "recipe": manifest["recipe"], "head_order": manifest["head_order"]}
        )

    def _finish(self) -> Verdict:
        complete = all(record.state == "done" for record in self.state.records)
        answer = decide(self.state.criteria, complete=complete)
        verdict = Verdict(
            verdict=answer.verdict,
            reason=answer.reason,
            sentence=answer.sentence,
            settled_by=self.state.settled or STAGES[-1],
            signature=self._signature(),
            criteria=tuple(self.state.criteria),
            stages=tuple(self.state.records),
            policy=self.policy.model_dump(mode="json"),
            policy_name=self.policy.name,
            policy_fingerprint=self.policy.fingerprint(),
            budget=self.budget.name,
            data={**self.state.data, "tasks": list(self.leaves), "rows": str(self.request.data_dir) if self.request.data_dir else None},
            provenance=collect(started_utc=self.started, command=command_line()),
        )
        write_stored(self.out / VERDICT, verdict)
        report = self.out / "report"
        if self.state.compared is None:
            write_verdict_page(verdict, report, overwrite=True)
            return verdict
        for name in ("diagnostics.json", "latency.json"):
            # Beside the run, where the report looks for them.
            for run in ("run", "text", "canary"):
                if (self.out / name).is_file() and (self.out / run).is_dir():
                    shutil.copyfile(self.out / name, self.out / run / name)
                    break
        folders = [f for f in ("canary", "run", "text") if (self.out / f / "provenance.json").is_file()]
        runs = [run for folder in folders for run in load_runs(self.out / folder)]
        spared = {arm.name: [self.canary] for arm in self._arms[3:]} if self.canary is not None and len(folders) > 1 else {}
        compared = compare(runs, self.policy.comparison(), spared=spared, title=f"{self.request.source} \u2192 {self.request.target}")
        comparison = compared.comparison.model_copy(
            update={
                "screen": verdict,
                "command": command_line(),
                "provenance": collect(started_utc=self.started, command=command_line()),
            }
        )
        write_report(replace(compared, comparison=comparison), report, overwrite=True)
        return verdict


def _read_json(file: Path) -> dict[str, Any]:
    """A record of a screen.

    Raises:
        ArtifactError: damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ArtifactError(f"'{file}' is damaged ({error}); pass --overwrite to begin the screen again") from error
    if not isinstance(found, dict):
        raise ArtifactError(f"'{file}' is damaged (not an object); pass --overwrite to begin the screen again")
    return found


def _fact(name: str, stage: str, what: str, passed: bool, reason: str) -> Criterion:
    """A criterion that is true or false rather than measured."""
    return Criterion(
        id=name, stage=stage, what=what, required=True, relation="at least", threshold=1.0, figure=float(passed), passed=passed, reason=reason
    )
