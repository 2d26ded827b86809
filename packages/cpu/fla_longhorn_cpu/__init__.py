"""Longhorn's operators on the CPU in loops compiled by Numba, which `import fla_longhorn` finds by an entry point."""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fla_longhorn.patches.changes import Changes


def register(changes: Changes) -> None:
    """Make fla's modules run on the CPU, and Longhorn's operators in compiled loops, where Numba compiles."""
    import fla_cpu
    from fla_cpu.backend import load_loops
    from fla_kit.numba import compiles
    from fla_longhorn.modules import dispatch
    from fla_longhorn.ops import backends
    from fla_longhorn.ops.backends import register_cpu_backend

    fla_cpu.register(changes)
    changes.set_attribute(backends, 'find_token_loops', find_token_loops)
    register_cpu_backend('numba', load_backend, compiles)
    changes.set_attribute(dispatch, 'find_loops', load_loops)


def find_token_loops() -> ModuleType | None:
    """The loops of decoded tokens, where Numba is the backend and `FLA_CPU_LOOPS` does not switch loops off."""
    return token_loops(os.environ.get('FLA_LONGHORN_BACKEND'))


@cache
def token_loops(asked: str | None) -> ModuleType | None:
    from fla_cpu.backend import import_loops
    from fla_longhorn.ops.backends import backend_name

    if import_loops() is None or backend_name('cpu', asked) != 'numba':
        return None
    return importlib.import_module('fla_longhorn_cpu.token')


def load_backend() -> ModuleType:
    """Import the loops; without Numba, or if it must not compile, raise and say so."""
    from fla_kit.numba import compiles

    if find_spec('numba') and not compiles():
        raise ValueError('FLA_LONGHORN_BACKEND=numba needs Numba to compile, but NUMBA_DISABLE_JIT is set')
    try:
        return importlib.import_module('fla_longhorn_cpu.backend')
    except ModuleNotFoundError as error:
        if error.name != 'numba':
            raise
        raise ModuleNotFoundError('the numba backend needs Numba: pip install numba', name='numba') from error
