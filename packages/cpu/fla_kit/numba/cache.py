"""Machine code on disk: a fault of the files costs compiling again, nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from numba.core.caching import FunctionCache


class DiskCache(FunctionCache):
    """Numba's cache of a function, which all functions of the process leave alone once one could not read or write it.

    Numba itself raises whatever is wrong: cut and empty files, those of another user, a disk without room.
    """

    is_faulty = False

    def load_overload(self, *args: Any) -> Any:
        return self.attempt(super().load_overload, *args)

    def save_overload(self, *args: Any) -> None:
        self.attempt(super().save_overload, *args)

    def attempt(self, access: Callable, *args: Any) -> Any:
        if DiskCache.is_faulty:
            return None
        try:
            return access(*args)
        # whatever unpickling raises
        except Exception as error:
            DiskCache.is_faulty = True
            print(
                f'fla_cpu: cannot use the machine code in {self.cache_path} ({type(error).__name__}: {error}): this process '
                'compiles its loops and leaves the files alone', file=sys.stderr, flush=True,
            )
            return None
