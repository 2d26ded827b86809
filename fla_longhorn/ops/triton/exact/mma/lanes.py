"""Which numbers a lane holds: operands in the order of accumulators, and the places in memory from which a lane loads them.

Of an accumulator `[16, 8]`, lane 4 g + t holds columns 2 t and 2 t + 1 of rows g and g + 8. The same registers are an operand
if its sums run over columns in that order. So a lane's sums have names: pair i of lane t in part j is column 8 j + 2 t + i.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

VERSION = tuple(map(int, re.findall(r'\d+', triton.__version__)[:2]))


@triton.constexpr_function
def joined_first():
    """Whether a lane's sums are in sequence: Triton up to 3.7 halves the bits that it counts behind a `join` (kWidth)."""
    return VERSION < (3, 8)


@triton.jit
def sums(x, DOT: tl.constexpr):
    """`[R, part, lane, pair]` as an operand `[R, 16]`, which has the sums that a lane holds where Triton takes them from."""
    R: tl.constexpr = x.shape[0]
    if DOT == 'tf32':
        # two products of 8 sums, each of one part
        x = tl.permute(x, (0, 3, 2, 1) if joined_first() else (0, 1, 3, 2))
    elif joined_first():
        x = tl.permute(x, (0, 2, 1, 3))
    return tl.reshape(x, (R, 16))


@triton.jit
def side_by_side(a, b, DOT: tl.constexpr):
    """Two accumulators `[R, 8]` as an operand `[R, 16]`."""
    R: tl.constexpr = a.shape[0]
    return sums(tl.permute(tl.join(tl.reshape(a, (R, 4, 2)), tl.reshape(b, (R, 4, 2))), (0, 3, 1, 2)), DOT)


@triton.jit
def load_operand(p, DOT: tl.constexpr):
    """`[16, 8]`; memory has `[column, lane, part, pair]`."""
    b_x = tl.reshape(tl.load(p + tl.arange(0, 128)), (8, 4, 2, 2))
    return tl.trans(sums(tl.permute(b_x, (0, 2, 1, 3)), DOT))


@triton.jit
def load_two_operands(p):
    """Two of `[16, 8]` in bfloat16; memory has `[column, lane, which, part, pair]`."""
    b_x = tl.permute(tl.reshape(tl.load(p + tl.arange(0, 256)), (8, 4, 2, 2, 2)), (2, 0, 3, 1, 4))
    b_x = tl.reshape(sums(tl.reshape(b_x, (16, 2, 4, 2)), 'bf16'), (2, 8, 16))
    return tl.split(tl.permute(b_x, (2, 1, 0)))


@triton.jit
def load_columns(p, K: tl.constexpr, DOT: tl.constexpr):
    """`[16, K]`: operands `[16, 8]` side by side; 16 bytes to a lane."""
    if K == 8:
        return load_operand(p, DOT)
    elif K == 16 and DOT == 'bf16':
        b_a, b_b = load_two_operands(p)
        return tl.reshape(tl.permute(tl.join(b_a, b_b), (0, 2, 1)), (16, K))
    else:
        b_a, b_b = load_columns(p, K // 2, DOT), load_columns(p + 8 * K, K // 2, DOT)
        return tl.reshape(tl.permute(tl.join(b_a, b_b), (0, 2, 1)), (16, K))


# The entries of a key in a state's columns: those that a lane holds of an operand's 16 or 32 rows are in sequence in memory.


@triton.jit
def by_entries(b_h):
    """The state `[R, K]` with its columns in the order of entries, for a store of vectors."""
    R: tl.constexpr = b_h.shape[0]
    K: tl.constexpr = b_h.shape[1]
    b_x = tl.reshape(b_h, (R, 1, 1, 2, 4, 2) if K == 16 else (R, K // 32, 2, 2, 4, 2))
    return tl.reshape(tl.permute(b_x, (0, 1, 4, 2, 3, 5)), (R, K))


@triton.jit
def by_columns(b_x):
    """A state `[R, K]` of entries with columns in the order of the state's."""
    R: tl.constexpr = b_x.shape[0]
    K: tl.constexpr = b_x.shape[1]
    b_h = tl.reshape(b_x, (R, 1, 4, 1, 2, 2) if K == 16 else (R, K // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(b_h, (0, 1, 3, 4, 2, 5)), (R, K))


@triton.jit
def column_of(o_k, K: tl.constexpr):
    """The state's column of each entry."""
    if K == 16:
        return o_k % 4 // 2 * 8 + o_k // 4 * 2 + o_k % 2
    else:
        return o_k // 32 * 32 + o_k % 8 // 4 * 16 + o_k % 4 // 2 * 8 + o_k % 32 // 8 * 2 + o_k % 2


@triton.jit
def load_keys(p, K: tl.constexpr, DOT: tl.constexpr):
    """`[K, 8]`, keys or queries of a half in bfloat16; tf32 reads the state as it is, bf16 by :func:`state_operand`."""
    if K == 16:
        b_x = tl.reshape(tl.load(p + tl.arange(0, 128)), (8, 1, 4, 1, 2, 2))
    else:
        # [token, entries by 32, lane, 16 of them, part, pair]
        b_x = tl.reshape(tl.load(p + tl.arange(0, 8 * K)), (K // 32, 8, 4, 2, 2, 2))
        b_x = tl.permute(b_x, (1, 0, 2, 3, 4, 5))
    if not joined_first() or DOT != 'bf16':
        b_x = tl.permute(b_x, (1, 3, 4, 2, 5, 0))
    elif K == 16:
        b_x = tl.permute(b_x, (1, 3, 2, 4, 5, 0))
    else:
        # a product takes both parts of the same 16 entries, which a lane has in two registers in sequence
        b_x = tl.permute(b_x, (1, 4, 2, 3, 5, 0))
    return tl.reshape(b_x, (K, 8))


@triton.jit
def state_operand(b_h):
    """The state `[R, K]` as an operand."""
    if joined_first():
        R: tl.constexpr = b_h.shape[0]
        K: tl.constexpr = b_h.shape[1]
        # [row, entries by 32, 16 of them, part, lane, pair]; a product takes what it takes in `load_keys`
        b_x = tl.reshape(b_h, (R, 1, 1, 2, 4, 2) if K == 16 else (R, K // 32, 2, 2, 4, 2))
        b_x = tl.permute(b_x, (0, 1, 2, 4, 5, 3) if K == 16 else (0, 1, 3, 4, 5, 2))
        b_a, b_b = tl.split(b_x)
        return tl.reshape(tl.permute(tl.join(b_a, b_b), (0, 1, 2, 3, 5, 4)), (R, K))
    else:
        return b_h


@triton.jit
def place(o_n, o_s):
    """Where `load_operand` has column n < 8 and sum s < 16."""
    return o_n * 16 + o_s % 8 // 2 * 4 + o_s // 8 * 2 + o_s % 2


@triton.jit
def place_of_two(o_n, o_s, which):
    """Where `load_two_operands` has them."""
    return o_n * 32 + o_s % 8 // 2 * 8 + which * 4 + o_s // 8 * 2 + o_s % 2


@triton.jit
def place_of_keys(o_t, o_k, K: tl.constexpr):
    """Where `load_keys`, of one half behind the other, has token t and entry k."""
    if K == 16:
        return o_t * 16 + o_k
    else:
        return o_t // 8 * (8 * K) + o_k // 32 * 256 + o_t % 8 * 32 + o_k % 32
