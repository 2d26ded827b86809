"""What the package brings to the plugin (:class:`fla_longhorn.ops.backends.Loops`), compiled when it is needed."""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

from fla_cpu.backend import import_loops
from fla_cpu.backend import load_loops as of_modules
from fla_kit.numba import compiles as is_available
from fla_kit.numba import is_disabled
from fla_longhorn.ops import backends
from fla_longhorn.ops.backends import Backend, TokenLoops

__all__ = ['is_available', 'load_operators', 'of_modules', 'of_token']


def load_operators() -> Backend:
    """Without Numba, or if it must not compile, raise and say so."""
    if find_spec('numba') and is_disabled():
        raise ValueError('FLA_LONGHORN_BACKEND=numba needs Numba to compile, but NUMBA_DISABLE_JIT is set')
    try:
        backend: Any = importlib.import_module('fla_longhorn_cpu.backend')
    except ModuleNotFoundError as error:
        if error.name != 'numba':
            raise
        raise ModuleNotFoundError('the numba backend needs Numba: pip install numba', name='numba') from error
    return backend


def of_token() -> TokenLoops | None:
    """None where Numba is not the backend or `FLA_CPU_LOOPS` switches loops off."""
    return token_loops(os.environ.get('FLA_LONGHORN_BACKEND'))


@cache
def token_loops(asked: str | None) -> TokenLoops | None:
    if import_loops() is None or backends.backend_name('cpu', asked, backends.loops) != 'numba':
        return None
    from fla_longhorn_cpu import token

    return token
