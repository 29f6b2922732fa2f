"""Answers on disk as they are computed, so that a killed evaluation loses at most one batch."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvbench.errors import KVBenchError


class Journal:
    """A key-value file: SQLite commits whole batches or nothing, also when the process is killed or the disk is full.

    Args:
        path: the file; its directory exists.

    Raises:
        KVBenchError: it cannot be written or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._run(self._open)

    def _open(self) -> None:
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")

    @staticmethod
    def key(*parts: Any) -> bytes:
        """SHA-256 of anything that JSON holds."""
        return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest()

    def get(self, key: bytes) -> Any | None:
        """The stored answer, or None."""
        row = self._connection.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, answers: Iterable[tuple[bytes, Any]]) -> None:
        """Store a batch in one transaction."""
        rows = [(key, json.dumps(value)) for key, value in answers]

        def write() -> None:
            with self._connection:
                self._connection.execute("BEGIN")
                self._connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

        self._run(write)

    def remove(self) -> None:
        """Close and delete: the run is finished and its samples hold everything."""
        self._connection.close()
        self.path.unlink(missing_ok=True)

    def _run(self, action: Any) -> None:
        try:
            action()
        except sqlite3.Error as error:
            raise KVBenchError(
                f"'{self.path}' cannot be written ({error}); everything finished so far is kept: make room or delete a damaged file, and repeat the same command"
            ) from error
