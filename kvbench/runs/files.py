"""Reading and writing the single files of a run: whole or not at all, and every failure said in words."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvbench._version import __version__
from kvbench.errors import ArtifactError, BadInputError, KVBenchError
from kvbench.runs.schema import SCHEMA_VERSION, Stored
from kvbench.storage import dump_json

T = TypeVar("T", bound=Stored)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def read_stored(file: Path, model: type[T]) -> T:
    """Read one JSON file of a run.

    Raises:
        ArtifactError: missing, damaged, of another schema, or of a newer version.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"'{file.parent}' has no {file.name}, so it is not a finished kvbench directory; check the path") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"'{file}' cannot be read: {error}; copy it again or repeat the run") from error
    version = found.get("version") if isinstance(found, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ArtifactError(f"'{file}' has schema version {version}, but this kvbench ({__version__}) reads up to {SCHEMA_VERSION}; upgrade kvbench")
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the top"
        raise ArtifactError(f"'{file}' is not a {model.__name__} of this kvbench ({__version__}): {where}: {first['msg']}") from error


def write_stored(file: Path, record: Stored) -> None:
    """Write one JSON file of a run, atomically, keys sorted.

    Raises:
        KVBenchError: the disk is full or the directory cannot be written; what was there before is intact.
    """
    write_whole(file, lambda path: path.write_text(dump_json(record.model_dump(mode="json")), encoding="utf-8"))


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary sibling that then takes the place of `file`.

    Raises:
        KVBenchError: as `write_stored`.
    """
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.chmod(0o644)
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failing disk into a message.

    Raises:
        KVBenchError: no space left.
        BadInputError: not writable.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL or "No space left" in str(error):
            raise KVBenchError(
                f"the disk is full: '{path}' was not written, everything written before it is intact; "
                "free some space and repeat the command to resume"
            ) from error
        raise BadInputError(f"cannot write '{path}': {error.strerror or error}; check the path and its permissions") from error
