"""Registers the Numba backend: the operators import neither Numba nor the loops' tool kit themselves."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from fla_kit.numba import compiles
from fla_longhorn.ops import backend


def register_numba() -> None:
    """Let the operators run on the CPU in loops compiled by Numba, where it compiles."""
    backend.register_cpu_backend('numba', load_numba, compiles)


def load_numba() -> ModuleType:
    """Import the backend; without Numba, or if it must not compile, raise and say so."""
    if find_spec('numba') and not compiles():
        raise ValueError('FLA_LONGHORN_BACKEND=numba needs Numba to compile, but NUMBA_DISABLE_JIT is set')
    try:
        return importlib.import_module(f'{backend.__package__}.numba')
    except ModuleNotFoundError as error:
        if error.name != 'numba':
            raise
        raise ModuleNotFoundError("the numba backend needs Numba: pip install 'fla-longhorn[cpu]'", name='numba') from error
