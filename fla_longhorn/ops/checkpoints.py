"""Slots of the states saved for backward; every backend follows these rules."""

from __future__ import annotations

from collections.abc import Sequence

import triton


def checkpoint_interval(K: int) -> int:
    """Tokens between the states saved for backward: a power of two that keeps these small compared with the inputs."""
    return min(max(1 << (8 * K - 1).bit_length(), 32), 256)


def num_checkpoints(B: int, T: int, N: int, interval: int, is_varlen: bool) -> int:
    """Number of slots. Sequence n owns slots `n * cdiv(T, interval) + i`, or with `cu_seqlens`, `bos // interval + n + i`.

    These never overlap and need no length on the host: `cdiv(e - b, C) <= e // C - b // C + 1`.
    """
    return T // interval + N if is_varlen else B * triton.cdiv(T, interval)


def filled_slots(bounds: Sequence[int], interval: int) -> list[int]:
    """Slots of packed sequences that hold a state, in the order of the tokens."""
    return [
        bos // interval + n + i for n, (bos, eos) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        for i in range(triton.cdiv(eos - bos, interval))
    ]
