"""The entry point's promise: what the user can mend is one line."""

from __future__ import annotations

import pytest

from kvbench import cli


class LibraryError(Exception):
    """Stands for an error class that belongs to a library, such as safetensors' own."""


def test_a_full_disk_is_one_line_whatever_library_noticed(monkeypatch, capsys):
    def full():
        raise LibraryError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(cli, "_app", lambda: full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("kvbench: the disk is full (Error while serializing")


def test_other_errors_are_not_hidden(monkeypatch):
    def broken():
        raise LibraryError("a defect")

    monkeypatch.setattr(cli, "_app", lambda: broken)
    with pytest.raises(LibraryError, match="a defect"):
        cli.main()
