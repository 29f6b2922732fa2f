"""Recipes of other people: a real installed package, module:Class, and the example that CONTRIBUTING.md shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from kvbench.errors import BadInputError
from kvbench.mappers.registry import recipe_class

ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).parent / "test_plugin_package"
PAIR = ("embedded:source", "embedded:target")


def _run(*arguments: object, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`kvbench ...` with further folders to import from."""
    paths = [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    command = [sys.executable, "-m", "kvbench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def _write_distribution(site: Path, name: str, entry_points: dict[str, str]) -> None:
    """What an installer leaves of a package: its metadata and entry points."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kvbench.mappers]", *lines, ""]))


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plugins") / "moments"
    small = ("--data", "embedded:world", "--sequences", 20, "--heldout", 5, "--seq-len", 128, "--stride", 1)
    done = _run("calibrate", *PAIR, *small, "--no-gates", "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package installed by pip from its source, without a network; by hand where its build backend is not installed."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    shutil.copytree(PACKAGE, source)
    where = folder / "site-packages"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(where), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(source / "src" / "kvbench_diagonal", where / "kvbench_diagonal")
        points = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]["kvbench.mappers"]
        _write_distribution(where, "kvbench-diagonal", points)
    return where


def test_an_installed_package_adds_a_recipe(site, moments, tmp_path):
    listed = _run("mapper", "ls", "--json", path=(site,))
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)["recipes"]["diagonal"] == "kvbench_diagonal:Diagonal"
    fitted = _run("fit", moments, "--recipe", "diagonal", "--set", "lambda=1", "--out", tmp_path / "d", "--json", path=(site,))
    assert fitted.returncode == 0, fitted.stderr
    assert json.loads(fitted.stdout)["recipe"] == {"method": "diagonal", "lambda_": 1.0}
    scored = _run(
        "evaluate", *PAIR, "--mapper", tmp_path / "d", "--tasks", "tiny_choice", "--limit", 4, "--no-gates", "--out", tmp_path / "run", path=(site,)
    )
    assert scored.returncode == 0, scored.stderr
    without = _run("fit", moments, "--recipe", "diagonal", "--out", tmp_path / "e")
    assert without.returncode == 2
    assert "unknown mapper recipe 'diagonal'" in without.stderr


def test_a_class_by_its_place_needs_no_installation(moments, tmp_path):
    source = (PACKAGE / "src",)
    fitted = _run("fit", moments, "--recipe", "kvbench_diagonal:Diagonal", "--out", tmp_path / "d", path=source)
    assert fitted.returncode == 0, fitted.stderr
    # Stored under a name that finds the class again.
    assert json.loads((tmp_path / "d" / "manifest.json").read_text())["recipe"]["method"] == "kvbench_diagonal:Diagonal"
    assert _run("mapper", "verify", tmp_path / "d", path=source).returncode == 0
    lost = _run("mapper", "verify", tmp_path / "d")
    assert lost.returncode != 0
    assert "kvbench_diagonal" in lost.stderr
    assert "Traceback" not in lost.stderr


def test_a_name_that_is_taken_is_an_error(site, tmp_path):
    _write_distribution(tmp_path, "kvbench-rival", {"diagonal": "kvbench_rival:Diagonal"})
    done = _run("mapper", "ls", path=(site, tmp_path))
    assert done.returncode == 2
    assert "two recipes are called 'diagonal'" in done.stderr
    assert "kvbench_rival:Diagonal" in done.stderr


def test_a_built_in_name_cannot_be_taken(tmp_path):
    _write_distribution(tmp_path, "kvbench-rival", {"ridge": "kvbench_rival:Ridge"})
    done = _run("mapper", "ls", path=(tmp_path,))
    assert done.returncode == 2
    assert "two recipes are called 'ridge'" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("json:JSONDecoder", "is not a subclass of kvbench.mappers.base.Recipe"),
        ("no_such_module:Recipe", "cannot be imported"),
        ("kvbench.mappers.ridge:Rigde", "cannot be imported"),
        ("rigde", "did you mean 'ridge'"),
    ],
)
def test_what_is_no_recipe_is_one_message(recipe, message):
    with pytest.raises(BadInputError, match=re.escape(message)):
        recipe_class(recipe)


def test_the_command_says_it_without_a_traceback(moments, tmp_path):
    done = _run("fit", moments, "--recipe", "json:JSONDecoder", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "is not a subclass of kvbench.mappers.base.Recipe" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_example_in_contributing_works(moments, tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = [textwrap.dedent(b) for b in re.findall(r"^[ ]*```python\n(.*?)^[ ]*```", text, flags=re.DOTALL | re.MULTILINE)]
    code = next(b for b in blocks if "(Recipe)" in b)
    assert len(code.splitlines()) < 40
    (tmp_path / "my_package.py").write_text(code, encoding="utf-8")
    name = re.search(r"class (\w+)\(Recipe\)", code)
    assert name
    out = tmp_path / "artifact"
    done = _run("fit", moments, "--recipe", f"my_package:{name[1]}", "--out", out, path=(tmp_path,))
    assert done.returncode == 0, done.stderr
    assert _run("mapper", "show", out, path=(tmp_path,)).returncode == 0
    scored = _run(
        "evaluate", *PAIR, "--mapper", out, "--tasks", "tiny_choice", "--limit", 4, "--no-gates", "--out", tmp_path / "run", path=(tmp_path,)
    )
    assert scored.returncode == 0, scored.stderr
