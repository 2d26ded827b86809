"""What the kernels of the exact update share: tiles, operand precision, products, step sizes, the two substitutions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import INTERPRETING
from fla_longhorn.ops.triton.device import multiprocessor_count
from fla_longhorn.ops.triton.exact.configs import CHUNK_SIZE

# split in time only a launch with at most this many warps a multiprocessor and at least this many saved states a sequence
WARPS_PER_MULTIPROCESSOR = 2
LEAST_INTERVALS = 8


def operand_precision(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """How products round their operands: `bf16`, `ieee` (float32, not at all) or `tf32`, which holds every float16 exactly."""
    dtypes = {q.dtype, k.dtype, v.dtype}
    if torch.float32 in dtypes:
        return 'ieee'
    if torch.float16 not in dtypes:
        return 'bf16'
    return 'ieee' if torch.version.hip else 'tf32'


def operand_dtype(precision: str) -> torch.dtype:
    """The dtype in which a kernel stores what a later kernel multiplies."""
    return torch.bfloat16 if precision == 'bf16' else torch.float32


def is_split(warps: int, T: int, interval: int, device: torch.device) -> bool:
    """Whether the forward over T tokens is split in time: the states first, then the outputs of all intervals at once.

    So where that many warps leave half of the device's schedulers empty, as one long sequence does. The states alone take
    about 0.6 of the whole time, the outputs less the fewer the warps are (predicted for an H100).
    """
    return warps <= WARPS_PER_MULTIPROCESSOR * multiprocessor_count(device) and LEAST_INTERVALS * interval <= T


def chunk_slots(B: int, T: int, N: int, is_varlen: bool) -> int:
    """Slots of per-chunk buffers, by the rule of :func:`fla_longhorn.ops.checkpoints.num_checkpoints`."""
    return T // CHUNK_SIZE + N if is_varlen else B * triton.cdiv(T, CHUNK_SIZE)


@triton.jit
def head_and_index(H: tl.constexpr):
    """This program's head, and its sequence or slot. Both are in the grid's first dimension: the other two end at 65535."""
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
    # not `X % BX`, which the interpreter lacks for a shape
    if X // BX * BX == X:
        return m_t
    else:
        return m_t & (o_x < X)[None, :]


@triton.jit
def chunk_offsets(
    i_v, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VEC: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """`o_t`, `o_k`, `o_v` of a chunk's tiles, and the columns of beta: those of v, or one of a scalar step."""
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    # what a thread may load at once decides which columns it owns; a hint on the sum is lost where i_v is always 0
    o_v = i_v * BV + tl.multiple_of(tl.arange(0, BV), VEC)
    o_b = tl.arange(0, 1) if SCALAR_BETA else o_v
    return o_t, o_k, o_v, o_b


@triton.jit
def gram_pointers(gram, a, i_gram, BT: tl.constexpr, DOT: tl.constexpr):
    """Addresses of the matrices that the gram kernel wrote for chunk `i_gram`."""
    PARTS: tl.constexpr = 1 if DOT == 'ieee' else 2
    return gram + i_gram * ((BT + 1) * BT), a + i_gram * (PARTS * BT * BT)


@triton.jit
def tile_offsets(S: tl.constexpr, o_t, o_c):
    """Offsets of a tile `[BT, BX]` of a tensor with token stride `S`.

    Kernels compute them before their loops: in the loops, the compiler takes registers for them that spill others.
    """
    # int64, so that a row's offset is a constant of the load
    return o_t[:, None].to(tl.int64) * S + o_c[None, :]


@triton.jit
def tile_pointers(x, S: tl.constexpr, i_t, o_t, o_c):
    """Addresses of a tile of `x`, with token stride `S`, from token `i_t` (int64) on."""
    return x + i_t * S + tile_offsets(S, o_t, o_c)


@triton.jit
def load_tile(p_x, o_t, o_c, left, X: tl.constexpr, PARTIAL: tl.constexpr):
    """Tile `[BT, BX]` at the addresses `p_x`, of a tensor that has `X` columns and, with `PARTIAL`, `left` more tokens."""
    BX: tl.constexpr = o_c.shape[0]
    # a scalar step has one column
    return tl.load(p_x, mask=tile_mask(o_t, o_c, left, BX if BX == 1 else X, BX, PARTIAL), other=0.0)


@triton.jit
def load_again(p_x, o_t, o_c, left, X: tl.constexpr, PARTIAL: tl.constexpr):
    """:func:`load_tile` of a tile that was loaded before: the compiler would take two equal loads for one, and hold it."""
    # `.ca`, which is the default, only tells the two apart
    m_x = tile_mask(o_t, o_c, left, X, o_c.shape[0], PARTIAL)
    return tl.load(p_x, mask=m_x, other=0.0, cache_modifier='.ca')


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """`b_x` rounded to the nearest value of `dtype`; the interpreter's own conversion to bfloat16 truncates."""
    if INTERPRETING and dtype == tl.bfloat16:
        b_i = b_x.to(tl.float32).to(tl.int32, bitcast=True)
        b_x = ((b_i + 0x7fff + ((b_i >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return b_x.to(dtype)


@triton.jit
def product(b_a, b_b, b_acc, DOT: tl.constexpr):
    """`b_acc + b_a b_b` with operands rounded to `DOT` and float32 sums."""
    if DOT == 'bf16':
        if INTERPRETING:
            # the interpreter's products of bfloat16 are wrong: round, then multiply in float32
            b_acc = tl.dot(rounded(b_a, tl.bfloat16).to(tl.float32), rounded(b_b, tl.bfloat16).to(tl.float32), acc=b_acc)
        else:
            b_acc = tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16), acc=b_acc)
    else:
        b_acc = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc=b_acc, input_precision=DOT)
    return b_acc


@triton.jit
def split(b_x, DOT: tl.constexpr):
    """`b_x` as two operands: the digits that `DOT` holds exactly, and the rest. Two products keep twice the digits."""
    cut: tl.constexpr = -65536 if DOT == 'bf16' else -8192
    b_hi = (b_x.to(tl.int32, bitcast=True) & cut).to(tl.float32, bitcast=True)
    return operand(b_hi, DOT), operand(b_x - b_hi, DOT)


@triton.jit
def kept(b_x, DOT: tl.constexpr):
    """What products keep of `b_x`, in float32: rounded to nearest for `bf16` (a NaN may get lost), truncated for `tf32`."""
    if DOT == 'bf16':
        return ((b_x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    elif DOT == 'tf32':
        return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    else:
        return b_x


@triton.jit
def split_product(b_x, b_b, b_acc, DOT: tl.constexpr):
    """`b_acc + b_x b_b` with `b_x` in two parts, so that it does not lose digits to `DOT`."""
    if DOT == 'ieee':
        return product(b_x, b_b, b_acc, DOT)
    else:
        b_hi, b_lo = split(b_x, DOT)
        return product(b_lo, b_b, product(b_hi, b_b, b_acc, DOT), DOT)


@triton.jit
def split_product_t(b_x, b_b, b_acc, DOT: tl.constexpr):
    """`b_acc + b_x^T b_b`, as :func:`split_product`; the two parts are cheaper to transpose than `b_x`."""
    if DOT == 'ieee':
        return product(tl.trans(b_x), b_b, b_acc, DOT)
    else:
        b_hi, b_lo = split(b_x, DOT)
        return product(tl.trans(b_lo), b_b, product(tl.trans(b_hi), b_b, b_acc, DOT), DOT)


@triton.jit
def operand(b_x, DOT: tl.constexpr):
    """`b_x` as an operand of products, rounded before it changes its layout."""
    return rounded(b_x, tl.bfloat16) if DOT == 'bf16' else b_x


@triton.jit
def row(b_x, s: tl.constexpr):
    """Row `s` of `[BT, BV]`. Where a thread owns whole columns it takes no instructions: the compiler drops sums with -0.0."""
    o_t = tl.arange(0, b_x.shape[0])
    return tl.sum(tl.where((o_t == s)[:, None], b_x, -0.0), 0)


@triton.jit
def gram_rows(p_gram, ROWS: tl.constexpr, BT: tl.constexpr, REVERSE: tl.constexpr):
    """The first `ROWS` rows of G, or those from the last on, each `[BT]`: a substitution then does not wait for each load."""
    rows = ()
    for s in tl.static_range(ROWS):
        rows = rows + (tl.load(p_gram + (BT - 1 - s if REVERSE else s) * BT + tl.arange(0, BT)),)
    return rows


@triton.jit
def forward_substitution(
    b_r, b_e, rows, p_gram, BT: tl.constexpr, DOT: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
):
    """Solve `R = B - strict_tril(G) (E * R)` for the residuals `R [BT, BV]` given `B` in `b_r`.

    `rows` holds the first `ROWS` rows of G, which is at `p_gram`. With `ROUND`, later rows use a row of U as products round
    it, and so correct the rounding error. Otherwise the error would grow with every repetition of a key.
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
