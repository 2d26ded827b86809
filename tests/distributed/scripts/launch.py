"""Ranks on the CPU, forked from one process that has imported everything: importing once for all saves most of the time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing import start_processes


def fork(main: Callable, size: int, *args) -> None:
    """Run `main(*args)` on `size` ranks with gloo; the first error of any rank is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (main, size, Path(folder) / 'store', args), nprocs=size, start_method='fork')


def _rank(rank: int, main: Callable, size: int, store: Path, args: tuple) -> None:
    dist.init_process_group('gloo', f'file://{store}', rank=rank, world_size=size)
    try:
        main(*args)
    finally:
        dist.destroy_process_group()
