"""What a run stores: versioned, closed schemas, a sentence under each field."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA_VERSION = 1
"""Of every file of a run; raised when an older kvbench could misread one."""

Role: TypeAlias = Literal["target", "source", "mapper", "control", "model"]
"""What an arm is to a comparison; 'model' is an arm of a foreign lm-eval run."""


class Stored(BaseModel):
    """Base of all stored records: unknown fields, NaN and infinity are refused; instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class ModelSpec(Stored):
    """One of the two models."""

    name: str
    """Hub id, path or `embedded:` name, as given."""
    revision: str | None = None
    """Hub revision, where there is one."""
    pin: dict[str, JsonValue] = Field(default_factory=dict)
    """Fingerprints of configuration, weights and tokenizer (`kvbench.pairs.pins.pin`)."""


class ArmSpec(Stored):
    """One way to answer."""

    name: str
    """As in tables and file names; unique within the run."""
    role: Role
    """What the arm is to a comparison."""
    mapper: str | None = None
    """Control name, artifact directory or `embedded:` name; None for `target` and `source`."""
    pin: dict[str, JsonValue] = Field(default_factory=dict)
    """What fixes the mapper: its SHA256SUMS digest, recipe, calibration fingerprint."""


class TaskSpec(Stored):
    """One lm-eval task, and how a comparison is to read it."""

    name: str
    """Name in lm-eval's results and samples."""
    num_fewshot: int | None = None
    """Examples in the prompt; None if unknown."""
    limit: float | None = None
    """lm-eval's --limit, if one applied to this task."""
    version: str | None = None
    """The task's own version."""
    data_fingerprint: str | None = None
    """SHA-256 of the rows it reads, where local data was given."""
    primary_metric: str | None = None
    """Metric of the headline table; None lets the comparison choose (`reporting.metrics.primary`)."""
    primary_filter: str | None = None
    """Filter of the headline table; None takes the first in the samples."""
    chance: float | None = None
    """Score of guessing; None lets the comparison derive it from the number of choices."""
    cluster: str | None = None
    """Group label (`conversation`, `article`, `subject`) that belongs together in resampling; None takes the one the samples have."""
    output_type: str | None = None
    """lm-eval's output type: multiple_choice, loglikelihood, generate_until."""


class RunSpec(Stored):
    """Everything that decides the scores of a run. Two runs of one spec answer alike."""

    format: Literal["kvbench-run"] = "kvbench-run"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    source: ModelSpec | None = None
    """The model that prefills."""
    target: ModelSpec | None = None
    """The model that answers."""
    arms: tuple[ArmSpec, ...] = ()
    """All arms, in the order of the tables."""
    tasks: tuple[TaskSpec, ...] = ()
    """All tasks, groups resolved, in the order of the tables."""
    pooled: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Groups that are read as one task (mmlu: its subjects), with their tasks; items are clustered by task."""
    hold_back: int | None = None
    """Last context tokens that the answering model runs itself."""
    batch_size: int | str | None = None
    """As given."""
    dtype: str | None = None
    """Computing dtype, e.g. float32."""
    device: str | None = None
    """Device, e.g. cpu."""
    attention: str | None = None
    """Attention backend, e.g. sdpa."""
    limit: float | None = None
    """lm-eval's --limit."""
    subset: dict[str, int] | None = None
    """Random subset of every task: {"n": ..., "seed": ...}."""
    seeds: dict[str, int] = Field(default_factory=dict)
    """Seeds by what they seed."""
    data: dict[str, str] = Field(default_factory=dict)
    """Fingerprints of local data by task or file."""
    chat_template: str | None = None
    """Name or SHA-256 of the chat template applied; None without one."""
    system_instruction: str | None = None
    """System prompt; None without one."""
    fewshot_as_multiturn: bool = False
    """Whether few-shot examples are turns of a chat."""
    generation: dict[str, JsonValue] = Field(default_factory=dict)
    """Overrides of the tasks' generation arguments."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything else that decides a score."""


class SampleRow(Stored):
    """One item answered by one arm. The join key is (task, filter, doc_id)."""

    task: str
    """lm-eval task."""
    filter: str
    """lm-eval filter; 'none' without one."""
    doc_id: int
    """Number of the document in the task's split."""
    arm: str
    """Who answered."""
    doc_hash: str
    """lm-eval's SHA-256 of the document."""
    prompt_hash: str
    """lm-eval's SHA-256 of the first request's context."""
    target_hash: str
    """lm-eval's SHA-256 of the gold answer."""
    request_hash: str
    """SHA-256 over all requests of the item: contexts, continuations, generation arguments."""
    metrics: dict[str, float | None]
    """Per-item score by metric; None where the arm has no finite score. Perplexities: negative log-likelihood in nats, summed over the item."""
    sizes: dict[str, float] = Field(default_factory=dict)
    """Tokens, words or bytes behind a metric that is a sum."""
    higher_is_better: dict[str, bool] = Field(default_factory=dict)
    """Direction by metric, where it is known."""
    loglikelihoods: tuple[float | None, ...] = ()
    """In nats, one per request; None where not finite."""
    choice: int | None = None
    """Request with the highest log-likelihood; None for other tasks or where one is NaN."""
    gold: str | None = None
    """Gold answer as text."""
    gold_choice: int | None = None
    """Number of the right choice."""
    text: str | None = None
    """Generated text after the filter."""
    response: str | None = None
    """Generated text before the filter."""
    n_context_tokens: int | None = None
    """Tokens of the (first) context, if counted."""
    groups: dict[str, str] = Field(default_factory=dict)
    """Labels of what the item belongs to: conversation, article, subject, turn."""
    prompt: str = ""
    """Context as text."""
    choices: tuple[str, ...] = ()
    """Continuations as text; where they are all alike, the contexts' ends that differ."""


class TaskResult(Stored):
    """lm-eval's aggregated figures of one task and arm, untouched."""

    task: str
    """lm-eval task or group."""
    arm: str
    """Who answered."""
    n: int | None = None
    """Items."""
    metrics: dict[str, float | None]
    """Value by `metric,filter`, as lm-eval names them."""
    higher_is_better: dict[str, bool | None] = Field(default_factory=dict)
    """Direction by metric name."""


class RunResults(Stored):
    """The file results.json."""

    format: Literal["kvbench-results"] = "kvbench-results"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    results: tuple[TaskResult, ...] = ()
    """One per task and arm."""


class Provenance(Stored):
    """Where and with what a run or a report was made. Decides no score, so it is not part of the spec."""

    format: Literal["kvbench-provenance"] = "kvbench-provenance"
    """Marks the file."""
    version: int = SCHEMA_VERSION
    """Schema version."""
    command: str | None = None
    """Command line as given."""
    started_utc: str | None = None
    """ISO 8601."""
    finished_utc: str | None = None
    """ISO 8601."""
    commit: str | None = None
    """Git commit of the kvbench checkout; None from a wheel."""
    dirty: bool | None = None
    """Whether that checkout had uncommitted changes."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library versions."""
    python: str = ""
    """Python version."""
    machine: dict[str, str] = Field(default_factory=dict)
    """Operating system, processor, accelerator."""
    threads: dict[str, int] = Field(default_factory=dict)
    """Thread counts by library or environment variable."""
    cost: dict[str, JsonValue] = Field(default_factory=dict)
    """Wall seconds by stage, tokens/s, peak bytes."""
    notes: tuple[str, ...] = ()
    """Anything a reader must know, e.g. contexts too short to transfer."""
