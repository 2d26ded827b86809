"""Tiles of a chunk's two halves, step sizes and pairs of tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import interpreting, log2e
from fla_longhorn.ops.triton.exact.common import load_tile, product, rounded, split, store_tile
from fla_longhorn.ops.triton.exact.mma.lanes import side_by_side


@triton.jit
def load_chunk(x, S: tl.constexpr, i_t, o_x, left, X: tl.constexpr):
    """Both halves `[BV, 8]` of the chunk at token `i_t`, of which there are `left`."""
    o_t = tl.arange(0, 8)
    b_a, b_b = load_tile(x, S, i_t, o_t, o_x, left, X), load_tile(x, S, i_t + 8, o_t, o_x, left - 8, X)
    return tl.trans(b_a), tl.trans(b_b)


@triton.jit
def store_chunk(x, S: tl.constexpr, i_t, o_x, left, X: tl.constexpr, b_a, b_b):
    """Rounded before they change their layout."""
    o_t = tl.arange(0, 8)
    store_tile(x, S, i_t, o_t, o_x, left, X, tl.trans(rounded(b_a, x.dtype.element_ty)))
    store_tile(x, S, i_t + 8, o_t, o_x, left - 8, X, tl.trans(rounded(b_b, x.dtype.element_ty)))


@triton.jit
def load_numbers(p):
    """Numbers of a chunk's tokens, `[1, 8]` twice."""
    o_t = tl.arange(0, 8)
    return tl.load(p + o_t)[None, :], tl.load(p + 8 + o_t)[None, :]


@triton.jit
def as_accumulators(b_a, b_b):
    """Tiles that a loop carries: only a product's result has their layout, so they are one, of zeros."""
    b_x = tl.zeros([b_a.shape[0], 16], dtype=tl.bfloat16)
    b_y = tl.zeros([16, 8], dtype=tl.bfloat16)
    return product(b_x, b_y, b_a.to(tl.float32), 'bf16'), product(b_x, b_y, b_b.to(tl.float32), 'bf16')


@triton.jit
def load_accumulators(x, S: tl.constexpr, i_t, o_x, left, X: tl.constexpr):
    """:func:`load_chunk`, of tiles that a loop carries."""
    b_a, b_b = load_chunk(x, S, i_t, o_x, left, X)
    return as_accumulators(b_a, b_b)


@triton.jit
def pairs(b_x):
    """The even and the odd columns."""
    R: tl.constexpr = b_x.shape[0]
    C: tl.constexpr = b_x.shape[1] // 2
    return tl.split(tl.reshape(b_x, (R, C, 2)))


@triton.jit
def reciprocal(b_x):
    """`1 / x` in one instruction; zero beyond 2^126, as of :func:`fla_longhorn.ops.triton.common.divide`."""
    if interpreting():
        return 1.0 / b_x
    else:
        return tl.inline_asm_elementwise('rcp.approx.ftz.f32 $0, $1;', '=f,f', [b_x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def steps_of(b_beta, b_n, OPTIONS: tl.constexpr):
    """:func:`fla_longhorn.ops.triton.common.step_sizes`, with `|k|^2 [1, 8]`."""
    C: tl.constexpr = 2.0 if OPTIONS.allow_neg_eigval else 1.0
    if OPTIONS.use_beta_sigmoid_in_kernel:
        b_e = reciprocal(tl.exp2(b_beta * -log2e()) + (1.0 + b_n))
    else:
        b_e = b_beta * reciprocal(1.0 + b_beta * b_n)
    return C * b_e


@triton.jit
def rounded_pairs(b_x, b_e0, b_e1, b_g, REVERSE: tl.constexpr):
    """X and W = E X, and W rounded, of each pair of tokens; of which the second comes first with REVERSE."""
    b_x0, b_x1 = pairs(b_x)
    if REVERSE:
        b_w1 = b_e1 * b_x1
        b_x0 -= b_g * b_w1
        b_w0 = b_e0 * b_x0
    else:
        b_w0 = b_e0 * b_x0
        b_x1 -= b_g * b_w0
        b_w1 = b_e1 * b_x1
    b_w = tl.join(rounded(b_w0, tl.bfloat16), rounded(b_w1, tl.bfloat16))
    return tl.reshape(tl.join(b_x0, b_x1), b_x.shape), tl.reshape(tl.join(b_w0, b_w1), b_x.shape), tl.reshape(b_w, b_x.shape)


@triton.jit
def rounded_solve(b_x, b_e, p_pairs, b_l, REVERSE: tl.constexpr):
    """`X - L W` and `W = E X` of 8 tokens `[BV, 8]`, as :func:`..forward.solve`; other pairs see W as it is stored."""
    b_g = tl.load(p_pairs + tl.arange(0, 4))[None, :]
    b_e0, b_e1 = pairs(b_e)
    b_y, b_v, b_w = rounded_pairs(b_x, b_e0, b_e1, b_g, REVERSE)
    for _ in tl.static_range(3):
        b_z = product(side_by_side(b_w, b_w, 'bf16'), b_l, b_x, 'bf16')
        b_y, b_v, b_w = rounded_pairs(b_z, b_e0, b_e1, b_g, REVERSE)
    return b_y, b_v, b_w


@triton.jit
def add_scaled(b_h, b_a, b_b, b_fa, b_fb, b_k):
    """`h + X K` of 16 tokens, each with a factor, after which one operand does not hold them."""
    b_ahi, b_alo = split(b_a.to(tl.float32) * b_fa, 'bf16')
    b_bhi, b_blo = split(b_b.to(tl.float32) * b_fb, 'bf16')
    b_h = product(side_by_side(b_alo, b_blo, 'bf16'), b_k, b_h, 'bf16')
    return product(side_by_side(b_ahi, b_bhi, 'bf16'), b_k, b_h, 'bf16')
