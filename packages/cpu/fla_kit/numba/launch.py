"""Compiling a loop, and running it on as many threads as torch uses."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch
from numba import njit

from fla_kit.numba import notice, threads
from fla_kit.numba.arguments import stored
from fla_kit.numba.cache import DiskCache

# below so many steps, as in decoding, one thread runs all: starting others takes 0.2 ms
MIN_PARALLEL_STEPS = 2**20


def compiled(function):
    """`njit` with its machine code cached on disk, or only in memory if no cache directory is writable.

    Numba recompiles when the function's own file changes; after an edit to a helper's file, delete the `.nbi` files.
    """
    loop = njit(nogil=True)(function)
    with suppress(RuntimeError):
        # as `cache=True` does; Numba has no public name for this
        loop._cache = DiskCache(function)
    return loop


def launch(loop, steps: int, blocks: int, *args) -> None:
    """Run `blocks` blocks on as many threads as torch uses, or on one if the loop has to be compiled first."""
    n_w = min(torch.get_num_threads(), blocks)
    if n_w <= 1 or steps < MIN_PARALLEL_STEPS or not loop.overloads:
        notice.call(loop, 0, 1, *args)
    else:
        threads.run(loop, n_w, *args)


def boundaries(B: int, T: int, cu_seqlens: torch.Tensor | None) -> np.ndarray:
    """Boundaries of the sequences over all rows of the batch; raises unless those given rise from 0 to the last row."""
    if cu_seqlens is None:
        return in_rows(B, T)
    stored('cu_seqlens', cu_seqlens, (cu_seqlens.numel(),))
    bounds = cu_seqlens.numpy().astype(np.int64)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != B * T or (bounds[1:] < bounds[:-1]).any():
        raise ValueError(f'cu_seqlens must rise from 0 to {B * T}, got {bounds.tolist()}')
    return bounds


@lru_cache(maxsize=64)
def in_rows(B: int, T: int) -> np.ndarray:
    return np.arange(0, (B + 1) * T, T)
