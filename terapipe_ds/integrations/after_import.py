"""Does something as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Calls ``act(module)`` once the module has been imported: now, or when a script does it.

    Whoever imports the module gets it after ``act`` is done, ``from name import ...`` included.

    Args:
        name: the module's full name.
        act: what to do; an exception of it is one of the import.
    """
    if name in sys.modules:
        act(sys.modules[name])
        return
    sys.meta_path.insert(0, _Watcher(name, act))


class _Watcher(MetaPathFinder):
    """Lets the other finders find one module, and acts after its own loader has run it."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            # Not installed: the import fails as it would have, and may be tried again later.
            sys.meta_path.insert(0, self)
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._act(module)

        # On the loader found for this import, so that all else about the module stays its own.
        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec


__all__ = ["after_import"]
