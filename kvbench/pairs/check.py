"""The pair check: may a KV cache go from this source to this target? Configurations and tokenizers are read, never weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from kvbench.errors import BadInputError, IncompatiblePairError
from kvbench.pairs.geometry import Geometry, cautions, geometry_of, refusals
from kvbench.pairs.locate import ModelRef, load_config, load_tokenizer, resolve
from kvbench.pairs.rope_settings import SUPPORTED_TYPES, Refusal, Topic, short_list
from kvbench.pairs.tokenizers import (
    PROBES,
    Vocabulary,
    compare_vocabularies,
    config_fingerprint,
    first_probe_difference,
    special_ids,
    tokenizer_fingerprint,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Status = Literal["ok", "warn", "refuse"]
_TOPICS: tuple[tuple[Topic, str], ...] = (("architecture", "architecture"), ("attention", "attention layout"), ("rope", "rope"))


@dataclass(frozen=True)
class CheckRow:
    """One line of the check.

    Attributes:
        name: What is looked at.
        status: `ok`, `warn` (goes on, and the detail says what to bear in mind) or `refuse`.
        source: The source's value; empty in a row about the target alone.
        target: The target's value; empty in a row about the source alone.
        detail: Why this status.
        remedy: What to do about a warning or refusal.
        codes: Names of the refusals or warnings in this row.
    """

    name: str
    status: Status
    source: str
    target: str
    detail: str = ""
    remedy: str = ""
    codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The row as one sentence, for an error message."""
        sides = ", ".join(f"{side} {value}" for side, value in (("source", self.source), ("target", self.target)) if value)
        return f"{self.name} ({sides}): {self.detail}" + (f" {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class PairReport:
    """What the check found.

    Attributes:
        source: The source as named by the user.
        target: The target as named by the user.
        rows: One row per property.
        fingerprints: Of configuration and tokenizer of both sides, where they could be read.
    """

    source: str
    target: str
    rows: tuple[CheckRow, ...]
    fingerprints: dict[str, str] = field(default_factory=dict)

    @property
    def compatible(self) -> bool:
        """Whether no row refuses the pair."""
        return not self.refused

    @property
    def refused(self) -> tuple[CheckRow, ...]:
        """The rows that refuse the pair."""
        return tuple(row for row in self.rows if row.status == "refuse")

    def to_dict(self) -> dict[str, object]:
        """The report as JSON values."""
        rows = [{**asdict(row), "codes": list(row.codes)} for row in self.rows]
        return {"source": self.source, "target": self.target, "compatible": self.compatible, "rows": rows, "fingerprints": dict(self.fingerprints)}

    def raise_if_refused(self) -> None:
        """Stop here if the pair is refused.

        Raises:
            IncompatiblePairError: naming every refusing row, its values and its remedy.
        """
        if not self.compatible:
            reasons = "\n".join(f"- {row}" for row in self.refused)
            raise IncompatiblePairError(f"no KV cache can go from '{self.source}' to '{self.target}':\n{reasons}")


@dataclass(frozen=True)
class _Side:
    role: Literal["source", "target"]
    ref: ModelRef
    config: PretrainedConfig
    refusals: list[Refusal]
    geometry: Geometry | None

    def row(self, name: str, status: Status, value: str, detail: str = "", remedy: str = "", codes: tuple[str, ...] = ()) -> CheckRow:
        source, target = (value, "") if self.role == "source" else ("", value)
        return CheckRow(f"{name} of {self.role}", status, source, target, detail, remedy, codes)


def check_pair(
    source: str,
    target: str,
    *,
    source_revision: str | None = None,
    target_revision: str | None = None,
    allow_mismatched: bool = False,
    trust_remote_code: bool = False,
) -> PairReport:
    """Check a pair without loading weights.

    Args:
        source: The model that prefills: hub id, directory, GGUF file or `embedded:NAME`.
        target: The model that answers.
        source_revision: Hub revision of the source.
        target_revision: Hub revision of the target.
        allow_mismatched: Only warn of unequal KV heads or head dimension (for mappers that allow them).
        trust_remote_code: Run code that the repositories carry.

    Returns:
        A report, compatible or not.

    Raises:
        BadInputError: a model cannot be found or read.
    """
    refs = resolve(source, source_revision), resolve(target, target_revision)
    same = all(getattr(refs[0], part) == getattr(refs[1], part) for part in ("path", "gguf_file", "revision"))
    configs = [load_config(refs[0], trust_remote_code=trust_remote_code)]
    configs.append(configs[0] if same else load_config(refs[1], trust_remote_code=trust_remote_code))
    sides = [_side("source", refs[0], configs[0]), _side("target", refs[1], configs[1])]
    rows = [row for side in sides for row in _side_rows(side)]
    left, right = sides[0].geometry, sides[1].geometry
    if left is not None and right is not None:
        rows = [*_geometry_rows(left, right, allow_mismatched), *rows, *_position_rows(left, right)]
    fingerprints = {f"{side.role}_config": config_fingerprint(side.config) for side in sides if side.geometry is not None}
    try:
        first = load_tokenizer(refs[0], trust_remote_code=trust_remote_code)
        second = first if same else load_tokenizer(refs[1], trust_remote_code=trust_remote_code)
    except BadInputError as error:
        if all(row.status != "refuse" for row in rows):
            raise
        # The models are refused already: a tokenizer that cannot be read must not hide why.
        rows.append(CheckRow("tokenizer", "warn", "", "", f"Not compared: {error}", "", ("tokenizer-unread",)))
    else:
        rows += _tokenizer_rows(first, second, left, right)
        fingerprints |= {"source_tokenizer": tokenizer_fingerprint(first), "target_tokenizer": tokenizer_fingerprint(second)}
    return PairReport(source, target, tuple(rows), fingerprints)


def _side(role: Literal["source", "target"], ref: ModelRef, config: PretrainedConfig) -> _Side:
    found = refusals(config)
    if any(refusal.topic == "architecture" for refusal in found):
        return _Side(role, ref, config, found, None)
    try:
        return _Side(role, ref, config, found, geometry_of(config))
    except BadInputError:
        if not found:
            raise
        return _Side(role, ref, config, found, None)


def _side_rows(side: _Side) -> list[CheckRow]:
    """Architecture, attention layout and RoPE of one model."""
    geometry = side.geometry
    # What the gates would decide is of no interest where they will not run.
    warnings = cautions(side.config) if geometry is not None and not side.refusals else []
    rows = []
    for topic, name in _TOPICS:
        refused = [refusal for refusal in side.refusals if refusal.topic == topic]
        if refused:
            value = "; ".join(refusal.value for refusal in refused)
            detail = " ".join(f"Refused: {refusal.code}: {refusal.reason}." for refusal in refused)
            remedy = " ".join(dict.fromkeys(refusal.remedy for refusal in refused))
            rows.append(side.row(name, "refuse", value, detail, remedy, tuple(refusal.code for refusal in refused)))
        elif geometry is not None:
            rows.append(_plain_row(side, geometry, topic, name, [warning for warning in warnings if warning.topic == topic]))
    return rows


def _plain_row(side: _Side, geometry: Geometry, topic: Topic, name: str, warnings: list[Refusal]) -> CheckRow:
    value = {"architecture": geometry.model_type, "attention": f"full in all {geometry.layers} layers", "rope": str(geometry.rope)}[topic]
    details = [f"{warning.code}: {warning.reason}." for warning in warnings]
    remedies = [warning.remedy for warning in warnings]
    codes = [warning.code for warning in warnings]
    sliding = geometry.sliding_layers
    if topic == "attention" and sliding:
        window = geometry.sliding_window
        value = f"window {window} in {len(sliding)} of {geometry.layers} layers"
        if geometry.max_positions is not None and window is not None and window >= geometry.max_positions:
            return side.row(name, "ok", value, "The window is as long as the longest context.")
        details.append(
            f"Sliding-window layers: {short_list(sliding)}. They equal full attention for contexts, answers included, of up to {window} tokens."
        )
        remedies.append(f"Keep context and answer within {window} tokens, or read results beyond as those of a cut-off context.")
        codes.append("sliding-window")
    if topic == "rope" and geometry.rope.rotary_dim < geometry.head_dim:
        details.append(f"Partial: the first {geometry.rope.rotary_dim} of {geometry.head_dim} entries of a head rotate.")
    return side.row(name, "warn" if codes else "ok", value, " ".join(details), " ".join(remedies), tuple(codes))


def _geometry_rows(source: Geometry, target: Geometry, allow_mismatched: bool) -> list[CheckRow]:
    rows = []
    for name, code, left, right in (
        ("kv heads", "kv-heads", source.kv_heads, target.kv_heads),
        ("head dim", "head-dim", source.head_dim, target.head_dim),
    ):
        if left == right:
            rows.append(CheckRow(name, "ok", str(left), str(right)))
        elif allow_mismatched:
            detail = "Experimental: the published methods require matched KV; only mappers that say so take unequal shapes."
            rows.append(CheckRow(name, "warn", str(left), str(right), detail, "Trust nothing but held-out results.", (code,)))
        else:
            detail = f"The methods map heads of one shape, and the models differ in their {name}."
            rows.append(CheckRow(name, "refuse", str(left), str(right), detail, "Choose two models of one family with matched KV.", (code,)))
    rows.append(CheckRow("layers", "ok", str(source.layers), str(target.layers), "" if source.layers == target.layers else "Depth may differ."))
    differ = source.query_heads != target.query_heads
    rows.append(CheckRow("query heads", "ok", str(source.query_heads), str(target.query_heads), "They stay in their model." if differ else ""))
    return rows


def _position_rows(source: Geometry, target: Geometry) -> list[CheckRow]:
    rows = []
    if {source.rope.type, target.rope.type} <= SUPPORTED_TYPES:
        values = (f"{source.rope.type}, theta {source.rope.theta:g}", f"{target.rope.type}, theta {target.rope.theta:g}")
        detail = "The same frequencies." if source.rope == target.rope else "Different, which is fine: keys are mapped with the rotation removed."
        rows.append(CheckRow("rope relation", "ok", *values, detail))
    limits = source.max_positions, target.max_positions
    shown = tuple("not stated" if limit is None else str(limit) for limit in limits)
    known = [limit for limit in limits if limit is not None]
    if not known:
        detail = "Neither configuration states its longest context."
        rows.append(
            CheckRow("position limit", "warn", shown[0], shown[1], detail, "Keep to the contexts the models were trained on.", ("position-limit",))
        )
    elif limits[0] == limits[1]:
        rows.append(CheckRow("position limit", "ok", shown[0], shown[1]))
    else:
        detail = f"Contexts are limited by the shorter one: {min(known)} tokens."
        rows.append(
            CheckRow(
                "position limit", "warn", shown[0], shown[1], detail, f"Keep context and answer within {min(known)} tokens.", ("position-limit",)
            )
        )
    return rows


def _tokenizer_rows(
    source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, source_geometry: Geometry | None, target_geometry: Geometry | None
) -> list[CheckRow]:
    tables = [geometry.vocab_size for geometry in (source_geometry, target_geometry) if geometry is not None]
    vocabulary = compare_vocabularies(source, target)
    rows = [_vocabulary_row(len(source.get_vocab()), len(target.get_vocab()), vocabulary, min(tables, default=None)), _special_row(source, target)]
    rows.append(_probe_row(source, target))
    if source_geometry is not None and target_geometry is not None:
        highest = max(source.get_vocab().values(), default=-1), max(target.get_vocab().values(), default=-1)
        rows.append(_embedding_row(source_geometry.vocab_size, target_geometry.vocab_size, highest))
    return rows


def _vocabulary_row(source_size: int, target_size: int, vocabulary: Vocabulary, smallest_table: int | None) -> CheckRow:
    left, right = f"{source_size} tokens", f"{target_size} tokens"
    if vocabulary.identical:
        return CheckRow("tokenizer vocabulary", "ok", left, right)
    extra = (*vocabulary.only_source, *vocabulary.only_target)
    named = ", ".join(f"{token!r} ({index})" for token, index in extra[:4])
    fits = smallest_table is None or all(index < smallest_table for _, index in extra)
    if vocabulary.appended_only and fits:
        detail = (
            f"One tokenizer has {len(extra)} tokens more behind {vocabulary.common} common ones: {named}. Both embedding tables have rows for them."
        )
        remedy = "Keep texts free of these tokens: one of the models was not trained on them."
        return CheckRow("tokenizer vocabulary", "warn", left, right, detail, remedy, ("vocabulary-extra",))
    if vocabulary.moved:
        detail = "; ".join(f"{token!r} is {first} in the source and {second} in the target" for token, first, second in vocabulary.moved[:3])
        detail = f"{len(vocabulary.moved)} tokens have unequal ids: {detail}."
    else:
        why = "beyond an embedding table" if vocabulary.appended_only else "among the common ones"
        detail = f"{len(extra)} tokens are in one vocabulary only, {why}: {named}."
    return CheckRow("tokenizer vocabulary", "refuse", left, right, detail, "Choose two models with one tokenizer.", ("vocabulary",))


def _special_row(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> CheckRow:
    ids = special_ids(source), special_ids(target)
    left, right = (", ".join(f"{name} {index}" for name, index in side.items() if index is not None) or "none" for side in ids)
    differing = [name for name in ids[0] if ids[0][name] != ids[1][name]]
    if not differing:
        return CheckRow("special tokens", "ok", left, right)
    if differing == ["pad"]:
        detail = "Only the pad token differs; padding is masked and never transferred."
        return CheckRow("special tokens", "warn", left, right, detail, "Nothing to do.", ("special-pad",))
    detail = f"The ids of {', '.join(differing)} differ, so prompts would begin, end or stop differently."
    remedy = "Choose two models of one tokenizer and one training stage (both base or both instruct)."
    return CheckRow("special tokens", "refuse", left, right, detail, remedy, ("special-ids",))


def _probe_row(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> CheckRow:
    difference = first_probe_difference(source, target)
    if difference is None:
        return CheckRow("tokenizer probes", "ok", "same ids", "same ids")
    encodings = [
        f"{role} {list(ids)} {list(tokens)}"
        for role, ids, tokens in (
            ("source", difference.source_ids, difference.source_tokens),
            ("target", difference.target_ids, difference.target_tokens),
        )
    ]
    detail = f"{difference.differing} of {len(PROBES)} probe texts are encoded differently; the first is {difference.text!r}: {', '.join(encodings)}."
    left, right = f"{len(difference.source_ids)} ids", f"{len(difference.target_ids)} ids"
    remedy = "Choose two models with one tokenizer, or give both the same tokenizer files."
    return CheckRow("tokenizer probes", "refuse", left, right, detail, remedy, ("probe-set",))


def _embedding_row(source_rows: int, target_rows: int, highest: tuple[int, int]) -> CheckRow:
    left, right = f"{source_rows} rows", f"{target_rows} rows"
    short = [
        f"{role} (highest id {top}, {rows} rows)"
        for role, top, rows in zip(("source", "target"), highest, (source_rows, target_rows), strict=True)
        if top >= rows
    ]
    if short:
        detail = f"The tokenizer knows ids that have no embedding row: {', '.join(short)}."
        remedy = "Keep texts free of these tokens, or resize the embedding table."
        return CheckRow("embedding rows", "warn", left, right, detail, remedy, ("embedding-rows",))
    return CheckRow("embedding rows", "ok", left, right, "" if source_rows == target_rows else "Padding only: every token has a row in both.")
