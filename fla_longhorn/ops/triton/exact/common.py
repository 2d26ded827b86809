"""Helpers of the exact update's kernels: tiles, operand precision, products and the two substitutions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import interpreting, padded_state_size
from fla_longhorn.ops.triton.device import card_of

# most warps per multiprocessor and fewest saved states per sequence of a launch that is split along the sequence
WARPS_PER_MULTIPROCESSOR = 2
LEAST_INTERVALS = 8

interval_of = triton.constexpr_function(checkpoint_interval)
padded = triton.constexpr_function(padded_state_size)


class Strides(NamedTuple):
    """Elements from one token to the next, in each tensor that may be strided."""

    q: int
    k: int
    v: int
    beta: int
    z: int
    g: int
    do: int = 0


def token_strides(strides: dict[str, int], do: int = 0) -> Strides:
    return Strides(strides['S_Q'], strides['S_K'], strides['S_V'], strides['S_B'], strides['S_Z'], strides['S_G'], do)


def operand_dtype(precision: str) -> torch.dtype:
    """The dtype in which a kernel stores operands of a later kernel's products."""
    return torch.bfloat16 if precision == 'bf16' else torch.float32


def is_split(warps: int, T: int, interval: int, device: torch.device) -> bool:
    """Whether to split the forward along its T tokens: the states first, then the outputs of all intervals at once.

    That pays where so few warps leave half of the device's schedulers idle, as with one long sequence (predicted, H100).
    """
    return warps <= WARPS_PER_MULTIPROCESSOR * card_of(device).multiprocessors and LEAST_INTERVALS * interval <= T


@triton.jit
def head_and_index(H: tl.constexpr):
    """This program's head, and its sequence or slot; both in the grid's first dimension, as others are limited to 65535."""
    i = tl.program_id(0)
    return i % H, i // H


@triton.jit
def head_index_and_channels(H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """This program's head, its sequence or slot, and its block of channels, which changes fastest."""
    i = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    return i // NV % H, i // (NV * H), i % NV


@triton.jit
def tile_mask(o_t, o_x, left, X: tl.constexpr):
    """Mask of a tile `[BT, BX]`: the first `left` tokens, and columns below `X`, or one for all channels."""
    BX: tl.constexpr = o_x.shape[0]
    # the interpreter lacks `X % BX` for a shape
    if BX == 1 or X // BX * BX == X:
        return (o_t < left)[:, None]
    else:
        return (o_t < left)[:, None] & (o_x < X)[None, :]


@triton.jit
def chunk_offsets(i_v, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VEC: tl.constexpr):
    """`o_t`, `o_k`, `o_v`, and the one column of a tensor with a number per head."""
    # the vector width decides which columns a thread owns; on the sum, the hint is lost where i_v is always 0
    o_v = i_v * BV + tl.multiple_of(tl.arange(0, BV), VEC)
    return tl.arange(0, BT), tl.arange(0, BK), o_v, tl.arange(0, 1)


@triton.jit
def tile_pointers(x, S: tl.constexpr, i_t, o_t, o_x):
    """Addresses of a tile of `x`, with token stride `S`, from token `i_t` (int64) on."""
    # int64, so that a row's offset is the load's immediate offset
    return x + i_t * S + (o_t[:, None].to(tl.int64) * S + o_x[None, :])


@triton.jit
def load_tile(x, S: tl.constexpr, i_t, o_t, o_x, left, X: tl.constexpr):
    """Tile `[BT, BX]` of `x`, which has `X` columns and token stride `S`, from token `i_t` on, of which there are `left`."""
    return tl.load(tile_pointers(x, S, i_t, o_t, o_x), mask=tile_mask(o_t, o_x, left, X), other=0.0)


@triton.jit
def load_keys(x, S: tl.constexpr, i_t, o_t, o_k, left, K: tl.constexpr):
    """Tile `[BT, BK]` of keys: its transpose is loaded, because Triton gives tiles of one shape, as values', one layout."""
    p_x = x + i_t * S + (o_k[:, None] + o_t[None, :].to(tl.int64) * S)
    return tl.trans(tl.load(p_x, mask=(o_k < K)[:, None] & (o_t < left)[None, :], other=0.0))


@triton.jit
def store_tile(x, S: tl.constexpr, i_t, o_t, o_x, left, X: tl.constexpr, b_x):
    """Store a tile, rounded to the dtype of `x`."""
    tl.store(tile_pointers(x, S, i_t, o_t, o_x), rounded(b_x, x.dtype.element_ty), mask=tile_mask(o_t, o_x, left, X))


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """`b_x` rounded to nearest in `dtype`; the interpreter's conversion to bfloat16 truncates."""
    if interpreting() and dtype == tl.bfloat16:
        b_i = b_x.to(tl.float32).to(tl.int32, bitcast=True)
        b_x = ((b_i + 0x7fff + ((b_i >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def product(b_a, b_b, b_acc, DOT: tl.constexpr):
    """`b_acc + b_a b_b` with operands rounded to `DOT` and float32 sums."""
    if DOT == 'bf16' and interpreting():
        # Triton's interpreter gets products of bfloat16 wrong, so it is given the rounded values in float32
        return tl.dot(rounded(b_a, tl.bfloat16).to(tl.float32), rounded(b_b, tl.bfloat16).to(tl.float32), acc=b_acc)
    elif DOT == 'bf16':
        return tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16), acc=b_acc)
    else:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc=b_acc, input_precision=DOT)


@triton.jit
def split(b_x, DOT: tl.constexpr):
    """`b_x` as a sum of two operands: the digits that `DOT` holds exactly, and the rest."""
    cut: tl.constexpr = -65536 if DOT == 'bf16' else -8192
    b_hi = (b_x.to(tl.int32, bitcast=True) & cut).to(tl.float32, bitcast=True)
    return operand(b_hi, DOT), operand(b_x - b_hi, DOT)


@triton.jit
def to_digits(b_x, DOT: tl.constexpr):
    """`b_x` rounded to nearest in the digits that `DOT` holds, in float32; a NaN may get lost."""
    if DOT == 'ieee':
        return b_x
    else:
        cut: tl.constexpr = -65536 if DOT == 'bf16' else -8192
        return ((b_x.to(tl.int32, bitcast=True) - cut // 2) & cut).to(tl.float32, bitcast=True)


@triton.jit
def split_product(b_x, b_b, b_acc, DOT: tl.constexpr):
    """`b_acc + b_x b_b` with `b_x` in two parts, so that it does not lose digits to `DOT`."""
    if DOT == 'ieee':
        return product(b_x, b_b, b_acc, DOT)
    else:
        b_hi, b_lo = split(b_x, DOT)
        return product(b_lo, b_b, product(b_hi, b_b, b_acc, DOT), DOT)


@triton.jit
def reads(b_h, b_x, DOT: tl.constexpr, SPLIT: tl.constexpr):
    """`(X S)^T [BV, BT]`, what keys or queries `[BT, BK]` read from a state `[BV, BK]`; with SPLIT in all its digits."""
    b_o = tl.zeros([b_h.shape[0], b_x.shape[0]], dtype=tl.float32)
    return split_product(b_h, tl.trans(b_x), b_o, DOT) if SPLIT else product(b_h, tl.trans(b_x), b_o, DOT)


@triton.jit
def add_updates(b_h, b_u, b_k, DOT: tl.constexpr):
    """The state `[BV, BK]` after `K^T U`: U `[BT, BV]` in parts, because rounding errors of a key's repetitions add up.

    Tensor cores sum over 16 tokens at least. So for 8 the parts are side by side, and each key is there twice.
    """
    if DOT == 'ieee':
        return product(tl.trans(b_u), b_k, b_h, DOT)
    else:
        b_hi, b_lo = split(b_u, DOT)
        b_k = operand(b_k, DOT)
        return product(tl.trans(alternate(b_hi, b_lo)), alternate(b_k, b_k), b_h, DOT)


@triton.jit
def alternate(b_a, b_b):
    """The rows of two tiles `[BT, BX]` by turns, `[2 BT, BX]`."""
    return tl.reshape(tl.permute(tl.join(b_a, b_b), (0, 2, 1)), (2 * b_a.shape[0], b_a.shape[1]))


@triton.jit
def operand(b_x, DOT: tl.constexpr):
    """`b_x` as an operand of products, rounded before its layout changes."""
    return rounded(b_x, tl.bfloat16) if DOT == 'bf16' else to_digits(b_x.to(tl.float32), DOT)


@triton.jit
def minus_zero():
    """-0.0, sums with which take no instruction; Triton makes the literal 0.0."""
    return tl.full([], -2147483648, dtype=tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def row(b_x, s: tl.constexpr):
    """Row `s` of `[BT, BV]`, in no instructions where a thread owns whole columns."""
    o_t = tl.arange(0, b_x.shape[0])
    return tl.sum(tl.where((o_t == s)[:, None], b_x, minus_zero()), 0)


@triton.jit
def gram_rows(p_gram, BT: tl.constexpr):
    """The rows `[BT]` of G, loaded before the products, so that a substitution does not wait for them."""
    rows = ()
    for s in tl.static_range(BT):
        rows = rows + (tl.load(p_gram + s * BT + tl.arange(0, BT)),)
    return rows


# With decays `d = e^g`, a chunk carries what its tokens read from the state, `C = K P`, from token to token, so that every
# decay multiplies what it decays. Products alone are right for each g, where a quotient of two cumulative decays overflows,
# and no later g enters an earlier token's sums. Without a gate, D is None.


@triton.jit
def substitution(b_c, b_v, b_e, b_d, rows, DOT: tl.constexpr):
    """The residuals `R [BT, BV]` of V given `K S` at the chunk's start in `b_c`, the step sizes E and the decays D.

    Later tokens use `E R` as `DOT` rounds it, and correct its rounding error, which would grow with each repetition of a key.
    """
    BT: tl.constexpr = b_v.shape[0]
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT):
        if b_d is not None:
            # what keys s and later read of the state before step s
            b_c = tl.where((o_t >= s)[:, None], b_c * row(b_d, s)[None, :], b_c)
        b_c = tl.where((o_t == s)[:, None], b_v - b_c, b_c)
        b_u = to_digits(row(b_c, s) * row(b_e, s), DOT)
        b_c += tl.where((o_t > s)[:, None], rows[s][:, None] * b_u[None, :], minus_zero())
    return b_c


@triton.jit
def add_reads(b_o, b_u, b_d, p_a, DOT: tl.constexpr):
    """The outputs `[BT, BV]` of U given `(Q S)^T` at the chunk's start in `b_o`; `p_a` has `A^T`."""
    BT: tl.constexpr = b_u.shape[0]
    o_t = tl.arange(0, BT)
    if b_d is None:
        return tl.trans(add_updates(b_o, b_u, tl.load(p_a + o_t[:, None] * BT + o_t[None, :]), DOT))
    else:
        b_o = tl.trans(b_o)
        for s in tl.static_range(BT):
            b_a = tl.load(p_a + s * BT + o_t)
            b_next = b_o * row(b_d, s)[None, :] + b_a[:, None] * row(b_u, s)[None, :]
            b_o = tl.where((o_t >= s)[:, None], b_next, b_o)
        return b_o


@triton.jit
def reverse_substitution(b_x, b_dy, b_e, b_d, rows, p_a):
    """`X [BT, BV]`, what keys read of the gradient behind their steps, given `K dS` at the chunk's end in `b_x`.

    `p_a` has `A^T` and then A.
    """
    BT: tl.constexpr = b_dy.shape[0]
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT - 1, -1, -1):
        # [BT]
        b_a = tl.load(p_a + (BT + s) * BT + o_t)
        b_add = b_x + b_a[:, None] * row(b_dy, s)[None, :]
        b_x = tl.where((o_t <= s)[:, None], b_add, b_x)
        if s > 0:
            b_w = row(b_x, s) * row(b_e, s)
            b_before = b_x - rows[s][:, None] * b_w[None, :]
            if b_d is not None:
                b_before *= row(b_d, s)[None, :]
            b_x = tl.where((o_t < s)[:, None], b_before, b_x)
    return b_x


@triton.jit
def products_after(b_d):
    """For each token of `[BT, BV]`, the product of the decays of later tokens, and that of all `[BV]`."""
    BT: tl.constexpr = b_d.shape[0]
    o_t = tl.arange(0, BT)
    b_x = b_d * 0.0 + 1.0
    for s in tl.static_range(BT - 1, 0, -1):
        b_x = tl.where((o_t == s - 1)[:, None], (row(b_x, s) * row(b_d, s))[None, :], b_x)
    return b_x, row(b_x, 0) * row(b_d, 0)
