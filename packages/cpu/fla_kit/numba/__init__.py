"""Loops compiled by Numba: vectors, memory, threads. Only this file is imported where Numba compiles nothing."""

import os
from importlib.util import find_spec


def compiles() -> bool:
    """Whether Numba is installed and, by its variable NUMBA_DISABLE_JIT, not told to leave functions to Python."""
    return find_spec('numba') is not None and os.environ.get('NUMBA_DISABLE_JIT', '0') in ('', '0')
