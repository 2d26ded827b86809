"""Helpers of the exact update's kernels: tiles, operand precision, products and the two substitutions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import INTERPRETING, decays
from fla_longhorn.ops.triton.device import multiprocessor_count

# most warps per multiprocessor and fewest saved states per sequence of a launch that is split along the sequence
WARPS_PER_MULTIPROCESSOR = 2
LEAST_INTERVALS = 8


def operand_dtype(precision: str) -> torch.dtype:
    """The dtype in which a kernel stores operands of a later kernel's products."""
    return torch.bfloat16 if precision == 'bf16' else torch.float32


def is_split(warps: int, T: int, interval: int, device: torch.device) -> bool:
    """Whether to split the forward along its T tokens: the states first, then the outputs of all intervals at once.

    That pays where so few warps leave half of the device's schedulers idle, as with one long sequence: the states alone take
    about 0.6 of the unsplit time, the outputs less the fewer warps there are (predicted for an H100).
    """
    return warps <= WARPS_PER_MULTIPROCESSOR * multiprocessor_count(device) and LEAST_INTERVALS * interval <= T


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
def tile_mask(o_t, o_x, left, X: tl.constexpr, BX: tl.constexpr, PARTIAL: tl.constexpr):
    """Mask of a tile `[BT, BX]`: columns below `X`, the first `left` tokens (without `PARTIAL`: all tokens if `left > 0`)."""
    m_t = (o_t < left)[:, None] if PARTIAL else (o_t * 0 < left)[:, None]
    # the interpreter lacks `X % BX` for a shape
    if X // BX * BX == X:
        return m_t
    else:
        return m_t & (o_x < X)[None, :]


@triton.jit
def chunk_offsets(
    i_v, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VEC: tl.constexpr, SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
):
    """`o_t`, `o_k`, `o_v` of a chunk's tiles, and the columns of beta and of g: those of v, or one for a scalar."""
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    # the vector width decides which columns a thread owns; on the sum, the hint is lost where i_v is always 0
    o_v = i_v * BV + tl.multiple_of(tl.arange(0, BV), VEC)
    o_b = tl.arange(0, 1) if SCALAR_BETA else o_v
    o_g = tl.arange(0, 1) if SCALAR_G else o_v
    return o_t, o_k, o_v, o_b, o_g


@triton.jit
def gram_pointers(gram, a, i_gram, BT: tl.constexpr, DOT: tl.constexpr, GATED: tl.constexpr):
    """Addresses of the matrices that the gram kernel wrote for chunk `i_gram`."""
    PARTS: tl.constexpr = 1 if DOT == 'ieee' and not GATED else 2
    return gram + i_gram * ((BT + 1) * BT), a + i_gram * (PARTS * BT * BT)


@triton.jit
def tile_offsets(S: tl.constexpr, o_t, o_c):
    """Offsets of a tile `[BT, BX]` of a tensor with token stride `S`; in a loop, computing them spills registers."""
    # int64, so that a row's offset is the load's immediate offset
    return o_t[:, None].to(tl.int64) * S + o_c[None, :]


@triton.jit
def tile_pointers(x, S: tl.constexpr, i_t, o_t, o_c):
    """Addresses of a tile of `x`, with token stride `S`, from token `i_t` (int64) on."""
    return x + i_t * S + tile_offsets(S, o_t, o_c)


@triton.jit
def load_tile(p_x, o_t, o_c, left, X: tl.constexpr, PARTIAL: tl.constexpr, AGAIN: tl.constexpr = False):
    """Tile `[BT, BX]` at the addresses `p_x`, of a tensor that has `X` columns and, with `PARTIAL`, `left` more tokens.

    `AGAIN`: it was loaded before, and `.ca`, which is the default, keeps the compiler from merging the loads and holding it.
    """
    BX: tl.constexpr = o_c.shape[0]
    # a step size per head is a tile of one column
    m_x = tile_mask(o_t, o_c, left, BX if BX == 1 else X, BX, PARTIAL)
    return tl.load(p_x, mask=m_x, other=0.0, cache_modifier='.ca' if AGAIN else '')


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """`b_x` rounded to nearest in `dtype`; the interpreter's conversion to bfloat16 truncates."""
    if INTERPRETING and dtype == tl.bfloat16:
        b_i = b_x.to(tl.float32).to(tl.int32, bitcast=True)
        b_x = ((b_i + 0x7fff + ((b_i >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def product(b_a, b_b, b_acc, DOT: tl.constexpr):
    """`b_acc + b_a b_b` with operands rounded to `DOT` and float32 sums."""
    if DOT == 'bf16':
        if INTERPRETING:
            # Triton's interpreter gets products of bfloat16 wrong, so it is given the rounded values in float32
            b_acc = tl.dot(rounded(b_a, tl.bfloat16).to(tl.float32), rounded(b_b, tl.bfloat16).to(tl.float32), acc=b_acc)
        else:
            b_acc = tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16), acc=b_acc)
    else:
        b_acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc=b_acc, input_precision=DOT)
    return b_acc


@triton.jit
def split(b_x, DOT: tl.constexpr):
    """`b_x` as a sum of two operands: the digits that `DOT` holds exactly, and the rest."""
    cut: tl.constexpr = -65536 if DOT == 'bf16' else -8192
    b_hi = (b_x.to(tl.int32, bitcast=True) & cut).to(tl.float32, bitcast=True)
    return operand(b_hi, DOT), operand(b_x - b_hi, DOT)


@triton.jit
def kept(b_x, DOT: tl.constexpr):
    """`b_x` as products round it, in float32: to nearest for `bf16` (a NaN may get lost), truncated for `tf32`."""
    if DOT == 'bf16':
        return ((b_x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    elif DOT == 'tf32':
        return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    else:
        return b_x


@triton.jit
def split_product(b_x, b_b, b_acc, DOT: tl.constexpr, TRANS: tl.constexpr = False):
    """`b_acc + b_x b_b` (`TRANS`: `b_x^T b_b`) with `b_x` in two parts, so that it does not lose digits to `DOT`."""
    if DOT == 'ieee':
        return product(tl.trans(b_x) if TRANS else b_x, b_b, b_acc, DOT)
    else:
        b_hi, b_lo = split(b_x, DOT)
        if TRANS:
            # both parts together are cheaper to transpose than b_x
            b_lo, b_hi = tl.trans(b_lo), tl.trans(b_hi)
        return product(b_lo, b_b, product(b_hi, b_b, b_acc, DOT), DOT)


@triton.jit
def operand(b_x, DOT: tl.constexpr):
    """`b_x` as an operand of products, rounded before its layout changes."""
    return rounded(b_x, tl.bfloat16) if DOT == 'bf16' else b_x


@triton.jit
def row(b_x, s: tl.constexpr):
    """Row `s` of `[BT, BV]`: no instructions where a thread owns whole columns, because the compiler drops sums with -0.0."""
    o_t = tl.arange(0, b_x.shape[0])
    return tl.sum(tl.where((o_t == s)[:, None], b_x, -0.0), 0)


@triton.jit
def gram_rows(p_gram, ROWS: tl.constexpr, BT: tl.constexpr, REVERSE: tl.constexpr):
    """The first `ROWS` rows `[BT]` of G, or the last ones, last first: a substitution then does not wait for their loads."""
    rows = ()
    for s in tl.static_range(ROWS):
        rows = rows + (tl.load(p_gram + (BT - 1 - s if REVERSE else s) * BT + tl.arange(0, BT)),)
    return rows


@triton.jit
def forward_substitution(b_r, b_e, rows, p_gram, BT: tl.constexpr, DOT: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr):
    """Solve `R = B - strict_tril(G) (E * R)` for the residuals `R [BT, BV]` given `B` in `b_r`.

    `rows` holds the first `ROWS` rows of G, which is at `p_gram`. With `ROUND`, later rows use U as products round it, and so
    correct its rounding error, which would otherwise grow with every repetition of a key.
    """
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT - 1):
        b_u = row(b_r, s) * row(b_e, s)
        if ROUND:
            b_u = kept(b_u, DOT)
        # [BT]
        b_gram = rows[s] if s < ROWS else tl.load(p_gram + s * BT + o_t)
        b_r -= tl.where((o_t > s)[:, None], b_gram[:, None] * b_u[None, :], 0.0)
    return b_r


@triton.jit
def reverse_substitution(b_x, b_e, rows, p_gram, BT: tl.constexpr, ROWS: tl.constexpr):
    """Solve `X = B - strict_tril(G)^T (E * X)` for `X [BT, BV]` given `B` in `b_x`, from the last row up.

    `rows` holds the last `ROWS` rows of G, the last one first; G is at `p_gram`.
    """
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT - 1, 0, -1):
        b_w = row(b_x, s) * row(b_e, s)
        # [BT]
        b_gram = rows[BT - 1 - s] if BT - 1 - s < ROWS else tl.load(p_gram + s * BT + o_t)
        b_x -= tl.where((o_t < s)[:, None], b_gram[:, None] * b_w[None, :], 0.0)
    return b_x


# With decays `d = e^g` per token and channel, a chunk carries what its tokens read from the state, `C = K P`, from token to
# token, so that every decay multiplies what it decays. Products alone are right for each g, where a quotient of two cumulative
# decays overflows, and no later g enters an earlier token's sums.


@triton.jit
def chunk_decays(b_g, p_g, o_t, left, S: tl.constexpr, BV: tl.constexpr):
    """The decays D `[BT, BV]` of a tile of g or, where it is None, of the scalars at `p_g`, with token stride `S`.

    Loaded as a vector, scalars come where a substitution wants them; a tile of one column would go through shared memory.
    """
    BT: tl.constexpr = o_t.shape[0]
    if b_g is None:
        b_d = decays(tl.load(p_g + o_t * S, mask=o_t < left, other=0.0))[:, None]
    else:
        b_d = decays(b_g)
    return tl.broadcast_to(b_d, (BT, BV))


@triton.jit
def decayed_substitution(b_c, b_v, b_e, b_d, p_gram, BT: tl.constexpr):
    """The residuals `R [BT, BV]` of V given `K S` at the chunk's start in `b_c`, the step sizes E and the decays D."""
    o_t = tl.arange(0, BT)
    b_r = b_v
    for s in tl.static_range(BT):
        # what keys s and later read of the state before step s
        b_c = tl.where((o_t >= s)[:, None], b_c * row(b_d, s)[None, :], b_c)
        b_r -= tl.where((o_t == s)[:, None], b_c, 0.0)
        if s < BT - 1:
            b_u = row(b_r, s) * row(b_e, s)
            b_gram = tl.load(p_gram + s * BT + o_t)
            b_c += tl.where((o_t > s)[:, None], b_gram[:, None] * b_u[None, :], 0.0)
    return b_r


@triton.jit
def decayed_reads(b_o, b_u, b_d, p_a, BT: tl.constexpr):
    """The outputs `[BT, BV]` of U given `Q S` at the chunk's start in `b_o`; `p_a` has `A^T`."""
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT):
        b_a = tl.load(p_a + s * BT + o_t)
        b_next = b_o * row(b_d, s)[None, :] + b_a[:, None] * row(b_u, s)[None, :]
        b_o = tl.where((o_t >= s)[:, None], b_next, b_o)
    return b_o


@triton.jit
def decayed_reverse_substitution(b_x, b_dy, b_e, b_d, p_gram, p_a, BT: tl.constexpr):
    """`X [BT, BV]`, what keys read of the gradient behind their steps, given `K dS` at the chunk's end in `b_x`.

    `p_a` has `A^T` and then A.
    """
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT - 1, -1, -1):
        # [BT]
        b_a = tl.load(p_a + (BT + s) * BT + o_t)
        b_add = b_x + b_a[:, None] * row(b_dy, s)[None, :]
        b_x = tl.where((o_t <= s)[:, None], b_add, b_x)
        if s > 0:
            b_w = row(b_x, s) * row(b_e, s)
            b_gram = tl.load(p_gram + s * BT + o_t)
            b_before = (b_x - b_gram[:, None] * b_w[None, :]) * row(b_d, s)[None, :]
            b_x = tl.where((o_t < s)[:, None], b_before, b_x)
    return b_x


@triton.jit
def products_until(b_d):
    """For each token of `[BT, BV]`, the product of the decays up to its own."""
    BT: tl.constexpr = b_d.shape[0]
    o_t = tl.arange(0, BT)
    b_x = b_d
    for s in tl.static_range(1, BT):
        b_x = tl.where((o_t == s)[:, None], b_x * row(b_x, s - 1)[None, :], b_x)
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


@triton.jit
def decayed(b_h, b_total):
    """The slices `[BV, BS]` of a state times a chunk's decay `[BV]`."""
    b_next = ()
    for s in tl.static_range(len(b_h)):
        b_next = b_next + (b_h[s] * b_total[:, None],)
    return b_next
