"""A line on stderr while a loop is compiled, so that a first call that takes long does not look like one that hangs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# seconds
PATIENCE = 3.0

_told = threading.Event()


def call(loop: Any, *args: Any) -> Any:
    """`loop(*args)`; a loop that has no machine code yet reads it from disk, or compiles for long and is told of, once."""
    return loop(*args) if loop.overloads else call_for_the_first_time(loop, args)


def call_for_the_first_time(loop: Callable, args: tuple) -> Any:
    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    # an interpreter that ends starts no thread
    with suppress(RuntimeError):
        timer.start()
    try:
        return loop(*args)
    finally:
        timer.cancel()


def tell() -> None:
    if not _told.is_set():
        _told.set()
        print(
            'fla_cpu: Numba compiles loops for this CPU, once; the machine code is kept on disk where that can '
            'be written (NUMBA_CACHE_DIR)', file=sys.stderr, flush=True,
        )
