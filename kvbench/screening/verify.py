"""Whether an artifact belongs to the models at hand, from files alone: no weights, no torch, for a router's start-up."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import ArtifactError
from kvbench.pairs.files import SAMPLED, file_fingerprints
from kvbench.pairs.locate import resolve
from kvbench.runs.files import read_stored
from kvbench.runs.verdict import Verdict
from kvbench.storage import SUMS, read_manifest, verify_sums

Status = Literal["ok", "differs", "not checked"]
VERDICT, SPEC, MAPPER = "verdict.json", "screen.json", "mapper"
HASHED_BYTES = 512 << 20
"""Artifacts up to this size are hashed whole, in about a third of a second; of larger ones the weight files are checked by size alone."""
VERDICT_FINDING = "verdict of the screen"


@dataclass(frozen=True)
class Finding:
    """One thing that was compared.

    Attributes:
        what: in words.
        status: of it.
        detail: both values where they differ, or why it was not checked.
    """

    what: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """Everything that was compared.

    Attributes:
        path: the artifact.
        findings: one per comparison.
        mapper_id: SHA-256 of its SHA256SUMS.
    """

    path: Path
    findings: tuple[Finding, ...]
    mapper_id: str

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return all(finding.status != "differs" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"path": str(self.path), "mapper_id": self.mapper_id, "passed": self.passed, "findings": [asdict(f) for f in self.findings]}


def mapper_id(path: Path) -> str:
    """SHA-256 of an artifact's SHA256SUMS, which names every byte of it."""
    return hashlib.sha256((path / SUMS).read_bytes()).hexdigest()


def verify_against(path: Path, source: str, target: str, *, source_revision: str | None = None, target_revision: str | None = None) -> Verification:
    """Compare an artifact, or the directory of a screen, with the models that are to be served.

    Files are compared by SHA-256; only where a configuration or tokenizer file differs or is not pinned, transformers is asked whether the
    difference matters (seconds instead of milliseconds). Weight files of the models are compared by size and both ends. The artifact is hashed
    whole up to `HASHED_BYTES`; beyond, its weight files are there and as long as their headers say, and `kvbench mapper verify` without
    `--against` hashes them.

    Args:
        path: artifact, or a directory with verdict.json.
        source: the model that prefills.
        target: the model that answers.
        source_revision: hub revision.
        target_revision: hub revision.

    Raises:
        ArtifactError: no artifact, or a damaged one.
        BadInputError: a model that is not there.
    """
    findings: list[Finding] = []
    if (path / VERDICT).is_file():
        verdict = read_stored(path / VERDICT, Verdict)
        if verdict.signature.mapper is None:
            raise ArtifactError(f"the screen at '{path}' ended without a mapper ({verdict.verdict}: {verdict.sentence}); there is nothing to verify")
        if verdict.verdict == "deploy" and any(c.required and c.passed is not True for c in verdict.criteria):
            raise ArtifactError(f"'{path / VERDICT}' says deploy, but not all of its required criteria passed: it was changed; screen again")
        screen, path = path, path / verdict.signature.mapper
        findings.append(Finding(VERDICT_FINDING, "ok" if verdict.verdict == "deploy" else "differs", f"{verdict.verdict} ({screen / VERDICT})"))
        same = mapper_id(path) == verdict.signature.mapper_id
        findings.append(Finding("artifact is the one that was screened", "ok" if same else "differs", "" if same else "other SHA256SUMS"))
    elif (path / SPEC).is_file():
        raise ArtifactError(f"the screen at '{path}' has no verdict yet; repeat its command, it goes on where it stopped")
    manifest = read_manifest(path, "mapper")
    findings.append(_intact(path))
    for role, name, revision in (("source", source, source_revision), ("target", target, target_revision)):
        findings += _model(role, manifest[role], name, revision)
    return Verification(path, tuple(findings), mapper_id(path))


def _intact(path: Path) -> Finding:
    """Whether the artifact's own files are what they were.

    Raises:
        ArtifactError: a file is missing, cut or changed.
    """
    names = [line.partition("  ")[2] for line in (path / SUMS).read_text(encoding="utf-8").splitlines()] if (path / SUMS).is_file() else []
    sizes = {name: (path / name).stat().st_size for name in names if (path / name).is_file()}
    if sum(sizes.values()) <= HASHED_BYTES:
        verify_sums(path)
        return Finding("artifact is intact", "ok", "every byte")
    large = [name for name in names if name.endswith(".safetensors")]
    verify_sums(path, only=[name for name in names if name not in large])
    for name in large:
        if name not in sizes:
            raise ArtifactError(f"'{path}' lacks the file {name}; copy it again")
        if sizes[name] != _stated_size(path / name):
            raise ArtifactError(f"'{path / name}' has {sizes[name]:,} bytes, not as many as its header says; copy it again")
    return Finding("artifact is intact", "ok", "sizes; `kvbench mapper verify` without --against checks every byte")


def _stated_size(file: Path) -> int:
    """Bytes of a safetensors file according to its header: 8 for the header's length, the header, and the last tensor's end."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, 100 << 20)))
        return 8 + length + max((int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"'{file}' is damaged: its header cannot be read; copy it again") from error


def _model(role: str, stored: dict[str, Any], name: str, revision: str | None) -> list[Finding]:
    ref = resolve(name, revision)
    findings = []
    if stored.get("revision") and revision:
        same = stored["revision"] == revision
        findings.append(
            Finding(f"{role} revision", "ok" if same else "differs", "" if same else f"{stored['revision']} in the artifact, {revision} asked for")
        )
    pinned, found = dict(stored.get("files") or {}), file_fingerprints(ref)
    weights = sorted(file for file in pinned if file.endswith(SAMPLED) and file in found)
    differing = [file for file in weights if pinned[file] != found[file]]
    if weights and not differing:
        findings.append(Finding(f"{role} weights", "ok", "size and both ends of every file"))
    elif differing:
        findings.append(
            Finding(
                f"{role} weights",
                "differs",
                f"{', '.join(f.removesuffix(SAMPLED) for f in differing)} of '{name}' are not those of '{stored['name']}'",
            )
        )
    else:
        findings.append(Finding(f"{role} weights", "not checked", "no weight file that is pinned and here; they are compared when they are loaded"))
    for what, files in (("configuration", ("config.json",)), ("tokenizer", ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"))):
        both = [file for file in files if file in pinned and file in found]
        if both and all(pinned[file] == found[file] for file in both):
            findings.append(Finding(f"{role} {what}", "ok", "same file"))
        else:
            findings.append(_meaning(role, what, stored, ref))
    return findings


def _meaning(role: str, what: str, stored: dict[str, Any], ref: Any) -> Finding:
    """Whether a file that differs, or is not pinned, means the same; this takes transformers."""
    from kvbench.pairs.locate import load_config, load_tokenizer
    from kvbench.pairs.tokenizers import config_fingerprint, tokenizer_fingerprint

    key = "config_fingerprint" if what == "configuration" else "tokenizer_fingerprint"
    wanted = stored.get(key)
    if wanted is None:
        return Finding(f"{role} {what}", "not checked", "the artifact does not pin it")
    found = config_fingerprint(load_config(ref)) if what == "configuration" else tokenizer_fingerprint(load_tokenizer(ref))
    if found == wanted:
        return Finding(f"{role} {what}", "ok", "same meaning")
    return Finding(f"{role} {what}", "differs", f"{str(wanted)[:12]} in the artifact ('{stored['name']}'), {found[:12]} in '{ref.name}'")
