"""Makes `lm_eval --model kvxfer` work where lm-eval does not read the entry-point group `lm_eval.models` (0.4.13 and before).

`kvbench.pth` imports this module when the interpreter starts. All it does then is to put one finder in front of the
import system; when `lm_eval.models` is imported, the finder steps aside, lets the import happen, and registers kvxfer lazily.
Nothing else is imported, least of all torch or lm_eval.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

MODULE = "lm_eval.models"
NAME, TARGET = "kvxfer", "kvbench.scoring.lm:KVTransferLM"


def register() -> None:
    """Register kvxfer in lm-eval's model registry, unless lm-eval found it or discovers plug-ins itself."""
    import lm_eval.api.registry as registry

    models = registry.model_registry
    if NAME in models or discovers_plugins(registry):
        return
    models.register(NAME, target=TARGET)


def discovers_plugins(registry: ModuleType) -> bool:
    """Whether this lm-eval reads entry points: its registry module then says so in its names."""
    names = [*vars(registry), *dir(type(registry.model_registry))]
    return any("entry_point" in name.lower() or "plugin" in name.lower() for name in names)


class _Finder:
    """Stands first on sys.meta_path until `lm_eval.models` is asked for."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        # On purpose: the loader runs the module, then registers what it defines.
        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Put the finder in place, once."""
    if MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()
