"""Where the content beside the package lies: in a wheel under kvbench/_content, in a checkout at the top."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def _content(name: str) -> Path:
    installed = _PACKAGE / "_content" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def tasks_directory() -> Path:
    """The lm-eval task files of kvbench; pass it to `lm_eval --include_path`."""
    return _content("tasks")


def mappers_directory() -> Path:
    """Recipe files and fitted artifacts of the embedded family."""
    return _content("mappers")
