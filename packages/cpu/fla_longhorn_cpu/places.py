"""Where the compiled loops read the initial state of each sequence and write its final state."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fla_longhorn.ops.pool import Pool, list_rows


@lru_cache(maxsize=64)
def in_order(N: int, size: int, reads: bool, writes: bool) -> np.ndarray:
    """`(sequence, place of the initial state, place of the final state)` of contiguous states; -1 means zero, or no write.

    Cached, so do not write to it.
    """
    own = np.arange(N) * size
    return np.stack([np.arange(N), own if reads else np.full(N, -1), own if writes else np.full(N, -1)], 1)


def in_pool(pool: Pool, N: int) -> np.ndarray:
    """:func:`in_order` for rows of a pool, without the sequences that have none. Cached too.

    Raises:
        ValueError: a sequence has no entry in the choices, or a row that is not in the pool.
    """
    return place_rows(pool.states.stride(0), *rows_in_pool(pool, N))


def rows_in_pool(pool: Pool, N: int) -> tuple:
    """What :func:`place_rows` and :func:`list_rows` need, by value."""
    return pool.states.shape[0], N, pool.pad_slot_id, *pool.read()


@lru_cache(maxsize=64)
def place_rows(stride: int, P: int, *choices: Any) -> np.ndarray:
    """The places of rows in a pool of P states that lie `stride` apart; `choices` are those of :func:`list_rows`."""
    found = [
        (n, max(first * stride, -1), max(last * stride, -1))
        for n, (first, last, used) in enumerate(checked_rows(P, *choices)) if used
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def checked_rows(P: int, N: int, pad_slot_id: int, *choices: tuple | None) -> tuple[tuple[int, int, bool], ...]:
    """:func:`fla_longhorn.ops.pool.list_rows`, of N sequences and in a pool of P rows."""
    if any(values is not None and len(values) != N for values in choices):
        raise ValueError(f'indices of rows must have one entry for each of {N} sequences, got {choices}')
    rows = list_rows(N, pad_slot_id, *choices)
    highest = max((max(first, last) for first, last, _ in rows), default=-1)
    if highest >= P:
        raise ValueError(f'indices must be below the number of rows of the pool, {P}, got {highest}')
    return rows
