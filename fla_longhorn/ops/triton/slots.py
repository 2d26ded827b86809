"""Slots of packed sequences, by the rule of `checkpoints.py`; rows of a pool, by that of `pool.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.pool import PAD_SLOT_ID, Pool


@triton.jit
def first_slot(bos, i_n, T, SIZE, IS_VARLEN: tl.constexpr):
    """Slot (int64) of the first `SIZE` tokens of sequence `i_n`."""
    if IS_VARLEN:
        return bos // SIZE + i_n
    else:
        return i_n.to(tl.int64) * tl.cdiv(T, SIZE)


@triton.jit
def num_slots(T, N, SIZE, IS_VARLEN: tl.constexpr):
    """All slots (int64) of N sequences."""
    return (T // SIZE + N if IS_VARLEN else N * tl.cdiv(T, SIZE)).to(tl.int64)


@triton.jit
def has_spare_slot(bos, eos, SIZE):
    """Whether a packed sequence owns one slot more than its tokens fill.

    Forward writes zeros to it, so that an operator's output has no unwritten elements.
    """
    return tl.cdiv(eos - bos, SIZE) <= eos // SIZE - bos // SIZE


@triton.jit
def sequence_range(cu_seqlens, i_n, T, IS_VARLEN: tl.constexpr):
    """First token (int64) and length of sequence `i_n`."""
    if IS_VARLEN:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        return bos, (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        return i_n.to(tl.int64) * T, T


@triton.jit
def sequence_of_slot(cu_seqlens, i_c, T, N, SIZE, IS_VARLEN: tl.constexpr):
    """The sequence that owns slot `i_c`: the last one whose first slot is not after `i_c`."""
    if IS_VARLEN:
        i_n = 0
        end = N
        while end - i_n > 1:
            mid = (i_n + end) // 2
            beyond = tl.load(cu_seqlens + mid).to(tl.int64) // SIZE + mid > i_c
            i_n = tl.where(beyond, i_n, mid)
            end = tl.where(beyond, mid, end)
        return i_n
    else:
        return i_c // tl.cdiv(T, SIZE)


@triton.jit
def locate_slot(cu_seqlens, i_c, T, N, SIZE, IS_VARLEN: tl.constexpr):
    """The sequence of slot `i_c`, its first token and length, and the position of the slot's first token in it."""
    i_n = sequence_of_slot(cu_seqlens, i_c, T, N, SIZE, IS_VARLEN)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    return i_n, bos, T_n, (i_c - first_slot(bos, i_n, T, SIZE, IS_VARLEN)) * SIZE


@triton.jit
def locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id):
    """Rows (int64) of a sequence's initial and final state, whether to read and to write them, whether it has a row."""
    first = i_n.to(tl.int64)
    used = first >= 0
    if state_indices is not None:
        first = tl.load(state_indices + i_n).to(tl.int64)
        used = (first >= 0) & (first != pad_slot_id)
    last, written, read = first, used, used
    if final_state_indices is not None:
        last = tl.load(final_state_indices + i_n).to(tl.int64)
        written = used & (last >= 0) & (last != pad_slot_id)
    if has_initial_state is not None:
        read = used & (tl.load(has_initial_state + i_n) != 0)
    return first, last, read, written, used


@triton.jit
def only_if(flag, m):
    """The mask `m` if the scalar `flag` holds, else false."""
    # `m & flag` fails in the interpreter
    return m & (tl.zeros(m.shape, tl.int32) + flag.to(tl.int32) > 0)


def row_arguments(pool: Pool | None, size: int) -> dict:
    """A kernel's arguments for `locate_states`, and the row stride of states of `size` elements."""
    if pool is None:
        choices = dict(state_indices=None, final_state_indices=None, has_initial_state=None)
        return dict(**choices, pad_slot_id=PAD_SLOT_ID, s_h=size, POOLED=False)
    return dict(**pool.contiguous().choices, pad_slot_id=pool.pad_slot_id, s_h=pool.states.stride(0), POOLED=True)
