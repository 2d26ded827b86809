"""A stub of sgl_kernel, SGLang's kernels, of which no build for CPUs is published: any name can be imported, a call raises.

SGLang imports the kernels wherever it runs. On a CPU without AMX it calls PyTorch instead.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Missing:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith('__'):
            raise AttributeError(name)
        return Missing(f'{self.__name__}.{name}')

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f'{self.__name__} is a stub')


class Stub(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Missing:
        if name.startswith('__'):
            raise AttributeError(name)
        return Missing(f'{self.__name__}.{name}')


class Submodules:
    """Finds and loads `sgl_kernel.*`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith('sgl_kernel.') else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Submodules())
sys.modules[__name__].__class__ = Stub
__path__: list[str] = []
