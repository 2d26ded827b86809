"""Ranks on the CPU, forked from one process that has imported everything: importing once for all saves most of the time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock
from torch.multiprocessing import start_processes


def fork(main: Callable, size: int, *args, start_method: str = 'fork') -> None:
    """Run `main(*args)` on `size` ranks with gloo; the first error of any rank is raised here. A GPU asks for `spawn`."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (main, size, Path(folder) / 'store', args), nprocs=size, start_method=start_method)


def _rank(rank: int, main: Callable, size: int, store: Path, args: tuple) -> None:
    compile_in_turn(store.with_name('compiling'))
    dist.init_process_group('gloo', f'file://{store}', rank=rank, world_size=size)
    try:
        main(*args)
    finally:
        dist.destroy_process_group()


def compile_in_turn(path: Path) -> None:
    """What one rank's Numba compiles the others wait for, and read from the disk."""
    if find_spec('numba') is None:
        return
    from numba.core.dispatcher import Dispatcher

    compile, lock = Dispatcher.compile, FileLock(path)

    def locked(self, signature):
        # the same rank may take it again, for a function that the first one calls
        with lock:
            return compile(self, signature)

    Dispatcher.compile = locked
