"""Runs compiled loops on several Python threads; they release the GIL.

Numba's own parallel loops would compile every loop a second time.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import torch

_pool: ThreadPoolExecutor | None = None
# the process that owns it, and its threads
_of: tuple[int, int] = (0, 0)


def run(loop: Callable, n_w: int, *args) -> None:
    """`loop(i_w, n_w, *args)` for each of `n_w` workers, on the calling thread and those that help it."""
    workers, failures = deque(range(n_w)), SimpleQueue[BaseException | None]()
    # each thread has a setting of its own
    flushes = flushes_denormals()

    def work() -> None:
        torch.set_flush_denormal(flushes)
        with suppress(IndexError):
            while True:
                failures.put(failure_of(loop, workers.popleft(), n_w, *args))

    # no thread can be started while the interpreter exits: use those that exist
    with suppress(RuntimeError):
        for _ in range(n_w - 1):
            pool(n_w - 1).submit(work)
    work()
    # wait for all: they write to memory that the caller may free
    for failure in [failures.get() for _ in range(n_w)]:
        if failure is not None:
            raise failure


def failure_of(function: Callable, *args) -> BaseException | None:
    try:
        function(*args)
    except BaseException as failure:
        return failure
    return None


def flushes_denormals() -> bool:
    """Whether the calling thread flushes denormals to zero (`torch.set_flush_denormal`)."""
    return sys.float_info.min / 2 == 0


def pool(n: int) -> ThreadPoolExecutor:
    """At least `n` threads of this process; a parent's threads do not survive a fork."""
    global _pool, _of
    pid, size = _of
    if _pool is None or pid != os.getpid() or size < n:
        _pool, _of = ThreadPoolExecutor(n, 'fla_cpu'), (os.getpid(), n)
    return _pool
