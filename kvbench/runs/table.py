"""Sample rows as flat tables: one parquet file per task and arm, one data frame per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench._version import __version__
from kvbench.errors import ArtifactError
from kvbench.runs.files import write_whole
from kvbench.runs.schema import SCHEMA_VERSION, SampleRow

METRIC, SIZE, BETTER, GROUP = "metric.", "size.", "better.", "group."
"""Prefixes of the columns that hold a dict field of `SampleRow`, one column per key."""
KEY = ("task", "filter", "doc_id", "arm")
"""What names a row."""
_VERSION_KEY = b"kvbench-samples"
_STRINGS = ("task", "filter", "arm", "doc_hash", "prompt_hash", "target_hash", "request_hash", "gold", "text", "response", "prompt")
_INTEGERS = ("doc_id", "choice", "gold_choice", "n_context_tokens")
_DICTS = {"metrics": (METRIC, pa.float64()), "sizes": (SIZE, pa.float64()), "higher_is_better": (BETTER, pa.bool_()), "groups": (GROUP, pa.string())}


def arrow_table(rows: Sequence[SampleRow]) -> pa.Table:
    """Flatten rows: `metric.acc`, `size.word_perplexity`, `better.acc`, `group.subject` are columns of their own."""
    columns: dict[str, pa.Array] = {}
    for name in _STRINGS:
        columns[name] = pa.array([getattr(row, name) for row in rows], pa.string())
    for name in _INTEGERS:
        columns[name] = pa.array([getattr(row, name) for row in rows], pa.int64())
    columns["loglikelihoods"] = pa.array([list(row.loglikelihoods) for row in rows], pa.list_(pa.float64()))
    columns["choices"] = pa.array([list(row.choices) for row in rows], pa.list_(pa.string()))
    for field, (prefix, kind) in _DICTS.items():
        for key in sorted({key for row in rows for key in getattr(row, field)}):
            columns[prefix + key] = pa.array([getattr(row, field).get(key) for row in rows], kind)
    return pa.table(columns).replace_schema_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def write_rows(file: Path, rows: Sequence[SampleRow]) -> None:
    """Write one parquet file atomically.

    Raises:
        KVBenchError: disk full; nothing of the file is left.
    """
    table = arrow_table(rows)
    write_whole(file, lambda path: pq.write_table(table, path, compression="zstd"))


def read_rows(file: Path) -> pd.DataFrame:
    """Read one parquet file.

    Raises:
        ArtifactError: damaged, or of a newer version.
    """
    try:
        table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise ArtifactError(
            f"'{file}' cannot be read: {str(error).splitlines()[0]}; delete it and repeat the run's command to compute it again"
        ) from error
    version = int((table.schema.metadata or {}).get(_VERSION_KEY, b"0"))
    if not 1 <= version <= SCHEMA_VERSION:
        raise ArtifactError(
            f"'{file}' has sample schema version {version}, but this kvbench ({__version__}) reads 1 to {SCHEMA_VERSION}; upgrade kvbench"
        )
    return _with_nullable(table.to_pandas())


def frame_of(rows: Sequence[SampleRow]) -> pd.DataFrame:
    """The data frame of rows that were never on disk."""
    return _with_nullable(arrow_table(rows).to_pandas())


def _with_nullable(frame: pd.DataFrame) -> pd.DataFrame:
    """Integers stay integers where some are missing."""
    return frame.astype({name: "Int64" for name in _INTEGERS if name != "doc_id"})


def concatenated(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """All frames one under the other; columns that a frame lacks are missing values there."""
    if not frames:
        return frame_of([])
    joined = pd.concat(frames, ignore_index=True)
    names = [str(name) for name in joined.columns]
    return joined[[name for name in names if "." not in name] + sorted(name for name in names if "." in name)]
