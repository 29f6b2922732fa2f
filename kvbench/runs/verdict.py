"""What `kvbench screen` decided, and everything it rests on: the schema of verdict.json."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, JsonValue

from kvbench.runs.schema import Provenance, Stored

VERDICT_VERSION = 1
"""Of verdict.json; raised when an older reader could misread it."""

Word: TypeAlias = Literal["deploy", "inconclusive", "do-not-deploy"]
"""The three ends of a screen."""
EXIT_CODES: dict[Word, int] = {"deploy": 0, "inconclusive": 3, "do-not-deploy": 4}
"""Exit status of `kvbench screen` by verdict; 2 is bad input."""


class Criterion(Stored):
    """One question of the policy, with the figure that answers it."""

    id: str
    """Stable name, e.g. `retention.task.gsm8k_cot`."""
    stage: str
    """Stage that measured it."""
    what: str
    """In words, e.g. 'gsm8k_cot: share of the target's score kept'."""
    required: bool
    """Whether the verdict depends on it; the others only warn."""
    relation: Literal["at least", "at most", "more than", "less than"]
    """How the bound is held against the threshold."""
    threshold: float
    """From the policy."""
    figure: float | None = None
    """What was measured; None where there is nothing."""
    bound: float | None = None
    """The side of the interval that is held against the threshold: lower for 'at least', upper for 'at most'."""
    other_bound: float | None = None
    """The other side: if even it misses the threshold, the criterion is failed and not only open."""
    level: float | None = None
    """Coverage of the interval; None for a figure without one (gates)."""
    unit: str = ""
    """Of figure, bounds and threshold."""
    n: int | None = None
    """Items, sequences or repeats behind the figure."""
    min_n: int | None = None
    """Fewest that the policy accepts."""
    passed: bool | None = None
    """True: the bound clears the threshold. False: it is missed beyond doubt. None: open, or no data; an open criterion never passes."""
    reason: str
    """Why, with the numbers."""


class StageRecord(Stored):
    """One stage of a screen."""

    name: str
    """check, gates, calibrate, fit, diagnose, canary, suite, timing."""
    state: Literal["done", "settled", "not reached"]
    """`settled`: it ended the screen."""
    seconds: float | None = None
    """Wall time, of the call that did the work."""
    note: str = ""
    """What it found, in a sentence."""


class Side(Stored):
    """One of the two models, as a router must recognise it."""

    name: str
    """As given."""
    revision: str | None = None
    """Hub commit, where there is one."""
    config_fingerprint: str | None = None
    """SHA-256 of what the configuration says about keys and values."""
    weights_fingerprint: str | None = None
    """SHA-256 over a sample of every parameter; None before the model was loaded."""
    tokenizer_fingerprint: str | None = None
    """SHA-256 of how text becomes ids."""
    files: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of small files that decide the above, so that they can be compared without any library."""
    layers: int | None = None
    """Layers with a cache."""
    kv_heads: int | None = None
    """KV heads per layer."""
    head_dim: int | None = None
    """Width of one head."""
    dtype: str | None = None
    """Cache dtype it was screened in."""
    rope: dict[str, JsonValue] = Field(default_factory=dict)
    """RoPE settings."""


class Signature(Stored):
    """What a router must find at start-up before it may transfer a cache."""

    source: Side
    """The model that prefills."""
    target: Side
    """The model that answers."""
    mapper: str | None = None
    """Directory of the chosen artifact, relative to verdict.json."""
    mapper_id: str | None = None
    """SHA-256 of the artifact's SHA256SUMS: it names every byte of it."""
    recipe: dict[str, JsonValue] = Field(default_factory=dict)
    """Method and settings."""
    head_order: str | None = None
    """Row and column order of its weights."""
    hold_back: int = 1
    """Last context tokens that the target runs itself."""


class Verdict(Stored):
    """The file verdict.json."""

    format: Literal["kvbench-verdict"] = "kvbench-verdict"
    """Marks the file."""
    version: int = VERDICT_VERSION
    """Schema version."""
    verdict: Word
    """The answer."""
    reason: Literal["passed", "refused", "gate", "quality", "source is as good", "nothing to gain", "speed", "open"]
    """What decided it."""
    sentence: str
    """The answer in words, with the figures it rests on."""
    settled_by: str
    """Stage after which nothing later could have changed it; the last one if all ran."""
    signature: Signature
    """What was judged."""
    criteria: tuple[Criterion, ...]
    """All that were looked at, in order."""
    stages: tuple[StageRecord, ...]
    """All of the plan, also those that were not reached."""
    policy: dict[str, JsonValue]
    """The whole policy."""
    policy_name: str
    """Its name."""
    policy_fingerprint: str
    """SHA-256 of its canonical JSON."""
    budget: str
    """quick, standard or full."""
    data: dict[str, JsonValue] = Field(default_factory=dict)
    """Calibration text and task rows, with fingerprints."""
    provenance: Provenance | None = None
    """Command, versions, machine."""

    @property
    def exit_code(self) -> int:
        """Exit status of the screen."""
        return EXIT_CODES[self.verdict]

    @property
    def failed(self) -> tuple[Criterion, ...]:
        """Required criteria that are missed beyond doubt."""
        return tuple(c for c in self.criteria if c.required and c.passed is False)

    @property
    def open(self) -> tuple[Criterion, ...]:
        """Required criteria without an answer."""
        return tuple(c for c in self.criteria if c.required and c.passed is None)

    @property
    def warnings(self) -> tuple[Criterion, ...]:
        """Warnings that were not cleared."""
        return tuple(c for c in self.criteria if not c.required and c.passed is not True)
