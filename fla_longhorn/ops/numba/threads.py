"""The compiled loops on several threads of Python: they hold no lock of the interpreter while they run.

Numba's own parallel loops would compile every loop a second time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

_pool: ThreadPoolExecutor | None = None
# the process that it belongs to, and its threads
_of: tuple[int, int] = (0, 0)


def run(loop: Callable, n_w: int, *args) -> None:
    """`loop(i_w, n_w, *args)` for each of `n_w` workers, the first on the calling thread."""
    others = [pool(n_w - 1).submit(loop, i_w, n_w, *args) for i_w in range(1, n_w)]
    try:
        loop(0, n_w, *args)
    finally:
        # they write to memory that the caller would free
        wait(others)
    for worker in others:
        worker.result()


def pool(n: int) -> ThreadPoolExecutor:
    """At least `n` threads of this process: those of a parent don't survive a fork."""
    global _pool, _of
    pid, size = _of
    if _pool is None or pid != os.getpid() or size < n:
        _pool, _of = ThreadPoolExecutor(n, 'longhorn'), (os.getpid(), n)
    return _pool
