"""Hooks that change a module when it is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


class Hook(importlib.abc.MetaPathFinder):
    """Finds the module as it would be found without the hook, and runs `before` and `after` around its code, once."""

    def __init__(self, name: str, after: Callable[[ModuleType], None], before: Callable[[], None] | None) -> None:
        self.name, self.after, self.before = name, after, before
        self.searching = False

    def find_spec(self, name, path=None, target=None):
        # another hook of the same module asks this one
        if name != self.name or self.searching:
            return None
        self.searching = True
        try:
            # some callers only check whether a module exists
            spec = next((
                found for finder in sys.meta_path if finder is not self and hasattr(finder, 'find_spec')
                if (found := finder.find_spec(name, path, target)) is not None
            ), None)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            if self.before is not None:
                self.before()
            execute(module)
            self.after(module)

        setattr(spec.loader, 'exec_module', exec_module)  # noqa: B010
        return spec


def after_import(name: str, after: Callable[[ModuleType], None], before: Callable[[], None] | None = None) -> None:
    """Call `after(module)` when the module of this name has been imported, and `before()` before its code runs."""
    if name not in sys.modules:
        sys.meta_path.insert(0, Hook(name, after, before))
    elif before is not None:
        raise RuntimeError(f'{name} has been imported already')
    else:
        after(sys.modules[name])
