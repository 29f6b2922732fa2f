"""Directories that appear whole or not at all, with checksums."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbench._version import __version__
from kvbench.errors import ArtifactError, BadInputError

SUMS = "SHA256SUMS"
FORMAT_VERSION = 1
"""Of every kvbench directory; raised when an older kvbench could misread one."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dump_json(value: Any) -> str:
    """Canonical JSON: sorted keys, no NaN."""
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def write_atomic(path: Path, text: str) -> None:
    """Write a text file through a temporary sibling, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_writable(out: Path, *, overwrite: bool = False) -> None:
    """Refuse an output directory before any work is done.

    Raises:
        BadInputError: it exists and `overwrite` is off, or cannot be made there.
    """
    if out.exists() and not overwrite:
        raise BadInputError(f"'{out}' exists already; choose another --out or pass --overwrite")
    parent = out.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise BadInputError(f"cannot write to '{out}': '{parent}' is not a directory; choose another --out")
    if not os.access(parent, os.W_OK):
        raise BadInputError(f"cannot write to '{out}': no permission in '{parent}'; choose another --out")
    try:
        # /proc and the like claim to be writable.
        Path(tempfile.mkdtemp(dir=parent, prefix=".kvbench.")).rmdir()
    except OSError as error:
        raise BadInputError(f"cannot write to '{out}': {error.strerror or error}; choose another --out") from error


@contextmanager
def atomic_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary directory that becomes `path`, with SHA256SUMS, when the block ends without an error.

    Raises:
        BadInputError: `path` exists and `overwrite` is off, or its parent cannot be written.
    """
    check_writable(path, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise BadInputError(f"cannot write to '{path.parent}': {error.strerror or error}") from error
    try:
        temporary.chmod(0o755)
        yield temporary
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        for file in files:
            file.chmod(0o644)
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            digests = list(pool.map(sha256_of, files))
        sums = "".join(f"{digest}  {p.relative_to(temporary).as_posix()}\n" for digest, p in zip(digests, files, strict=True))
        (temporary / SUMS).write_text(sums, encoding="utf-8")
        if path.exists():
            retired = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
            path.rename(retired / path.name)
            temporary.rename(path)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def verify_sums(path: Path, *, only: Sequence[str] | None = None) -> None:
    """Check the files of a directory against its SHA256SUMS.

    Args:
        path: the directory.
        only: check just these files (opening a large calibration should not read all of it).

    Raises:
        ArtifactError: no sums, a missing or an added file, a changed byte.
    """
    sums_file = path / SUMS
    if not sums_file.is_file():
        raise ArtifactError(f"'{path}' has no {SUMS}; it was not written by kvbench or the file was lost")
    listed: dict[str, str] = {}
    for line in sums_file.read_text(encoding="utf-8").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise ArtifactError(f"'{sums_file}' is damaged: line '{line[:80]}' is not a checksum and a name")
        listed[name] = digest
    for name, digest in listed.items():
        if only is not None and name not in only:
            continue
        file = path / name
        if not file.is_file():
            raise ArtifactError(f"'{path}' lacks the file {name}; copy it again")
        found = sha256_of(file)
        if found != digest:
            raise ArtifactError(
                f"'{file}' was changed after it was written (SHA-256 {found[:12]}... instead of {digest[:12]}...); fetch or fit it again"
            )
    if only is None:
        extra = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - set(listed) - {SUMS}
        if extra:
            raise ArtifactError(f"'{path}' holds files that are not in {SUMS}: {', '.join(sorted(extra))}; remove them")


def versions() -> dict[str, str]:
    """Versions of the libraries that decide what is computed."""
    import torch
    import transformers

    return {"kvbench": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def utc_now() -> str:
    """Current UTC time, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_manifest(path: Path, kind: str) -> dict[str, Any]:
    """Read manifest.json of a mapper or of moments.

    Raises:
        ArtifactError: missing, not JSON, of another kind, or of a newer format.
    """
    wanted = f"kvbench-{kind}"
    file = path / "manifest.json"
    if not path.is_dir():
        raise BadInputError(f"'{path}' is not a directory; give a directory that kvbench wrote ({wanted})")
    if not file.is_file():
        raise ArtifactError(f"'{path}' has no manifest.json, so it is not a {wanted} directory")
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"'{file}' is damaged: {error}; fetch or fit it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != wanted:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise ArtifactError(f"'{path}' is of format '{found}', not '{wanted}'")
    version = manifest.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ArtifactError(f"'{path}' has format version {version}, but this kvbench ({__version__}) reads up to {FORMAT_VERSION}; upgrade kvbench")
    return manifest
