"""Where lm-eval's stock tasks are defined, found by name without lm-eval's own index, which takes many seconds to build."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import BadInputError
from kvbench.paths import tasks_directory

_NAME = r"""["']?([\w.:/+-]+)["']?"""
_DEFINES = re.compile(rf"""^["']?(?:task|group|tag)["']?[ \t]*:[ \t]*{_NAME}[ \t]*\r?$""", re.MULTILINE)
_TAG_LIST = re.compile(r"""^["']?(?:group|tag)["']?[ \t]*:[ \t]*\r?\n((?:[ \t]*-.*\n?)+)""", re.MULTILINE)


@dataclass
class Leaf:
    """A task that was reached from the names asked for.

    Attributes:
        name: lm-eval's task name.
        path: Its YAML file.
        config: What that file says, includes merged, functions as text.
        num_fewshot: The most examples that the task itself or a group on the way to it asks for.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    num_fewshot: int = 0


@dataclass
class Definitions:
    """Tasks and groups behind some names.

    Attributes:
        leaves: Tasks by name, in order of first appearance.
        groups: YAML file of every group on the way, by name.
        folders: Folders that together define all of them; give them to lm-eval's TaskManager.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    groups: dict[str, Path] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)


def find_definitions(names: Sequence[str], include: Sequence[Path] = ()) -> Definitions:
    """Find tasks, groups and tags by name, members of groups included.

    `TaskManager(include_path=definitions.folders, include_defaults=False)` then loads the names.

    Args:
        names: lm-eval names.
        include: further folders of task files; of equal names, theirs count.

    Raises:
        BadInputError: an unknown name.
    """
    from lm_eval.tasks import TaskManager

    own = [tasks_directory(), *include]
    stock: list[Path] = []
    looked_up: set[str] = set()
    while True:
        folders = [*stock, *own]
        index = TaskManager(include_path=list(folders), include_defaults=False).task_index
        found = Definitions(folders=folders)
        reached: set[str] = set()
        for name in names:
            _walk(name, index, found, reached, 0)
        # A tag is complete only with every file that carries it, so each name is looked up once even if it is known already.
        new = reached - looked_up
        looked_up |= new
        more = sorted({folder for name in new for folder in _stock_names().get(name, ())} - set(stock))
        if not more:
            _refuse_unknown(reached - index.keys())
            return found
        stock += more


def _walk(name: str, index: Mapping[str, Any], found: Definitions, reached: set[str], num_fewshot: int) -> None:
    reached.add(name)
    entry = index.get(name)
    if entry is None:
        return
    kind, config = str(entry.kind.name), entry.cfg or {}
    if kind == "TAG":
        for member in sorted(entry.tags):
            _walk(member, index, found, reached, num_fewshot)
        return
    asked = max(num_fewshot, int(config.get("num_fewshot") or 0))
    if kind == "GROUP":
        found.groups.setdefault(name, Path(entry.yaml_path))
        for member in config.get("task") or ():
            settings = member if isinstance(member, Mapping) else {"task": member}
            inner = settings.get("group") or settings.get("task")
            if isinstance(inner, str):
                _walk(inner, index, found, reached, max(asked, int(settings.get("num_fewshot") or 0)))
        return
    leaf = found.leaves.setdefault(name, Leaf(name, Path(entry.yaml_path), config))
    leaf.num_fewshot = max(leaf.num_fewshot, asked)


@functools.lru_cache(maxsize=1)
def _stock_names() -> Mapping[str, tuple[Path, ...]]:
    """Name of a stock task, group or tag -> folders with files that define or carry it."""
    names: dict[str, dict[Path, None]] = {}
    for folder, _, files in os.walk(stock_directory()):
        for file in files:
            if file.endswith(".yaml"):
                text = Path(folder, file).read_text(encoding="utf-8", errors="replace")
                for name in _named(text):
                    names.setdefault(name, {})[Path(folder)] = None
    return {name: tuple(folders) for name, folders in names.items()}


def _named(text: str) -> Iterable[str]:
    yield from _DEFINES.findall(text)
    for block in _TAG_LIST.findall(text):
        yield from re.findall(rf"-[ \t]*{_NAME}", block)


def stock_directory() -> Path:
    """The folder of lm-eval's stock tasks."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None  # a dependency
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"


def _refuse_unknown(names: set[str]) -> None:
    if not names:
        return
    name = min(names)
    near = difflib.get_close_matches(name, [*_stock_names(), *(path.stem for path in tasks_directory().glob("*.yaml"))], n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise BadInputError(f"unknown task '{name}'; {hint}'kvbench tasks ls' lists kvbench's own, 'lm_eval ls tasks' the stock ones")
