"""Loops compiled by Numba: vectors, memory, threads. Only this file is imported where Numba compiles nothing."""

import importlib
import os
import warnings
from functools import cache
from importlib.util import find_spec


def compiles() -> bool:
    """Whether Numba is installed, can be imported and is not told to leave functions to Python."""
    return not is_disabled() and find_spec('numba') is not None and imports()


def is_disabled() -> bool:
    """Whether Numba's variable NUMBA_DISABLE_JIT is set."""
    return os.environ.get('NUMBA_DISABLE_JIT', '0') not in ('', '0')


@cache
def imports() -> bool:
    """Whether an installed Numba can be imported; warns, once, if it cannot."""
    try:
        importlib.import_module('numba.extending')
    # by NumPy's version ImportError, AttributeError or SystemError, without LLVM's library OSError
    except Exception as error:
        warnings.warn(
            'Numba is installed and cannot be imported; PyTorch computes what its loops would, more slowly. '
            f'{type(error).__name__}: {error}', stacklevel=2,
        )
        return False
    return True
