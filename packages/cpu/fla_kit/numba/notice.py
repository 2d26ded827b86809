"""A line on stderr while a loop is compiled, so that a slow first call does not look like a hang."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any

# seconds of compiling after which a line is printed
PATIENCE = 3.0

_told = threading.Event()


def call(loop: Any, *args: Any) -> Any:
    """`loop(*args)`. A loop without machine code loads it from disk or compiles; if that takes long, print so, once."""
    return loop(*args) if loop.overloads else call_for_the_first_time(loop, args)


def call_for_the_first_time(loop: Any, args: tuple) -> Any:
    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    # no thread can be started while the interpreter exits
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
