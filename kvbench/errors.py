"""What a user can fix, said once and without a traceback."""

from __future__ import annotations


class KVBenchError(Exception):
    """A condition the user can fix.

    The message says what is wrong, which value it is, and what to do. The command line prints it without a
    traceback and exits with `exit_code`.
    """

    exit_code = 2


class BadInputError(KVBenchError):
    """An argument, a file or a data set that cannot be used as given."""


class IncompatiblePairError(KVBenchError):
    """Two models between which a KV cache cannot be transferred."""

    exit_code = 4


class ArtifactError(KVBenchError):
    """A stored mapper, moment file or run that is damaged, foreign, or made by a newer kvbench."""


class GateError(KVBenchError):
    """A loaded model that failed a gate; nothing measured on it would mean anything."""

    exit_code = 4


class UndefinedResultError(KVBenchError):
    """A figure that has no value for the data at hand."""
