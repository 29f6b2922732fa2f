"""Imports point one way, downward (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvbench"
# What each part may import of kvbench, besides errors, storage, paths and _version.
ALLOWED = {
    "kv": set(),
    "pairs": {"kv", "embedded"},
    "calibration": {"kv", "pairs", "embedded"},
    "mappers": {"kv", "pairs", "calibration"},
    "scoring": {"kv", "pairs", "calibration", "mappers", "stats", "runs", "embedded", "diagnostics"},
    "diagnostics": {"kv", "pairs", "calibration", "mappers", "stats", "runs"},
    "timing": {"kv", "pairs", "calibration", "mappers", "scoring", "diagnostics", "stats", "runs"},
    "stats": set(),
    "runs": {"stats"},
    "reporting": {"stats", "runs"},
    "embedded": set(),
    "scale": {"stats", "runs"},
    "screening": {"kv", "pairs", "calibration", "mappers", "scoring", "diagnostics", "timing", "stats", "runs", "reporting"},
}
BASE = {"errors", "storage", "paths", "_version", "ranks"}


def _imports(path: Path) -> set[str]:
    """Parts of kvbench that a file imports at run time (TYPE_CHECKING blocks count for nothing)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {id(n) for b in ast.walk(tree) if isinstance(b, ast.If) and getattr(b.test, "id", "") == "TYPE_CHECKING" for n in ast.walk(b)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("kvbench.")}
    return found


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_parts_import_only_what_lies_below(part):
    for path in (PACKAGE / part).rglob("*.py"):
        upward = _imports(path) - ALLOWED[part] - BASE - {part}
        assert not upward, f"{path.relative_to(PACKAGE.parent)} imports {sorted(upward)}"


def test_every_part_has_a_rule():
    parts = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert parts - {"cli"} <= set(ALLOWED)
