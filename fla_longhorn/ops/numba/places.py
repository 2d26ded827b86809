"""Where the compiled loops read the initial state of each sequence and write its final state."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fla_longhorn.ops.pool import Pool


@lru_cache(maxsize=64)
def in_order(N: int, size: int, reads: bool, writes: bool) -> np.ndarray:
    """`(sequence, place of the initial state, place of the final state)` of contiguous states; -1 means zero, or no write.

    Cached, so do not write to it.
    """
    own = np.arange(N) * size
    return np.stack([np.arange(N), own if reads else np.full(N, -1), own if writes else np.full(N, -1)], 1)


def in_pool(pool: Pool, N: int) -> np.ndarray:
    """:func:`in_order` for rows of a pool, without the sequences that have none."""
    first, last, used = (x.numpy() for x in pool.locate(N))
    stride = pool.states.stride(0)
    places = np.stack([np.arange(N), np.where(first < 0, -1, first * stride), np.where(last < 0, -1, last * stride)], 1)
    return places[used]


def span(states: Tensor) -> np.ndarray:
    """The memory from the first element of strided rows to the last."""
    size = (len(states) - 1) * states.stride(0) + states[0].numel()
    return torch.as_strided(states, (size,), (1,)).numpy()
