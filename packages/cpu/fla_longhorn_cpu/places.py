"""Where the compiled loops read the initial state of each sequence and write its final state."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fla_longhorn.ops.pool import Pool, list_rows


@lru_cache(maxsize=64)
def in_order(N: int, size: int, reads: bool, writes: bool) -> np.ndarray:
    """`(sequence, place of the initial state, place of the final state)` of contiguous states; -1 means zero, or no write.

    Cached, so do not write to it.
    """
    own = np.arange(N) * size
    return np.stack([np.arange(N), own if reads else np.full(N, -1), own if writes else np.full(N, -1)], 1)


def in_pool(pool: Pool, N: int) -> np.ndarray:
    """:func:`in_order` for rows of a pool, without the sequences that have none. Cached too."""
    return _in_pool(pool.states.stride(0), N, pool.pad_slot_id, *pool.read())


@lru_cache(maxsize=64)
def _in_pool(stride: int, *choices: Any) -> np.ndarray:
    return place_rows(list_rows(*choices), stride)


def place_rows(rows: tuple[tuple[int, int, bool], ...], stride: int) -> np.ndarray:
    """From :func:`fla_longhorn.ops.pool.list_rows` to places in a pool of states `stride` apart."""
    found = [(n, max(first * stride, -1), max(last * stride, -1)) for n, (first, last, used) in enumerate(rows) if used]
    return np.array(found, np.int64).reshape(-1, 3)


def span(states: Tensor) -> np.ndarray:
    """The memory from the first element of strided rows to the last."""
    size = (len(states) - 1) * states.stride(0) + states[0].numel()
    return torch.as_strided(states, (size,), (1,)).numpy()
