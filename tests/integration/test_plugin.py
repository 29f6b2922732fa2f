"""The start-up hook: cheap, lazy, and silent where it has nothing to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench import _plugin

ROOT = Path(__file__).parents[2]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


def test_importing_kvbench_imports_no_torch_and_no_lm_eval():
    done = _python("import sys, kvbench, kvbench._plugin; print([m for m in ('torch', 'lm_eval', 'numpy', 'transformers') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_the_test_above_can_fail():
    done = _python("import sys, kvbench.kv.rope; print('torch' in sys.modules)")
    assert done.stdout.strip() == "True"


def test_kvxfer_is_registered_lazily_when_lm_eval_models_is_imported():
    code = (
        "import sys, kvbench._plugin; import lm_eval.models; from lm_eval.api.registry import model_registry; "
        "print('kvxfer' in model_registry, 'kvbench.scoring.lm' in sys.modules, any(type(f).__name__ == '_Finder' for f in sys.meta_path))"
    )
    assert _python(code).stdout.strip() == "True False False"


def test_the_registered_class_is_ours():
    code = "import kvbench._plugin, lm_eval.models; from lm_eval.api.registry import get_model; print(get_model('kvxfer').__name__)"
    assert _python(code).stdout.strip() == "KVTransferLM"


def test_the_pth_line_is_silent_without_lm_eval_and_without_kvbench(tmp_path):
    line = (ROOT / "kvbench.pth").read_text()
    assert line.startswith("import ")
    assert line.count("\n") == 1
    done = subprocess.run([sys.executable, "-I", "-S", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class _Registry(dict):
    def register(self, name, target):
        self[name] = target


def test_an_lm_eval_that_discovers_plugins_is_left_alone(monkeypatch):
    discovering = SimpleNamespace(model_registry=_Registry(), _load_entry_points=lambda: None)
    assert _plugin.discovers_plugins(discovering)
    assert not _plugin.discovers_plugins(SimpleNamespace(model_registry=_Registry()))


def test_registering_twice_changes_nothing():
    code = "import kvbench._plugin as p, lm_eval.models; p.register(); p.register(); p.install(); print('fine')"
    done = _python(code)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("wing", ["stats", "runs", "reporting"])
def test_the_evidence_wing_imports_no_torch(wing):
    code = f"import sys, importlib, pkgutil, kvbench.{wing} as w\nfor m in pkgutil.walk_packages(w.__path__, w.__name__ + '.'): importlib.import_module(m.name)\nprint('torch' in sys.modules)"
    done = _python(code)
    assert done.stdout.strip() == "False", done.stderr
