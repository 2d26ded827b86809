"""Steps of the diagonal update's backward kernel: a block of tokens forward, then back, with their states in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import decays, sigmoid, step_factors, step_sizes, weighted_rows
from fla_longhorn.ops.triton.diagonal.common import from_word, row_offset, unstack, update


@triton.jit
def sum_channels(b_x, SUM_PRECISION: tl.constexpr):
    """Sums of b_x `[BK, BV]` over v % 4, `[BK, BV / 4]`, on the tensor cores: a product with a matrix of ones and zeros.

    A thread has one channel v and all j. The right operand has rows [j, v % 4] and columns v / 4: then its layout is the one
    that the values have, and none changes its thread. The product selects j and adds over v % 4.
    """
    BK: tl.constexpr = b_x.shape[0]
    BV: tl.constexpr = b_x.shape[1]
    b_x = tl.reshape(tl.permute(tl.reshape(b_x, (BK, BV // 4, 4)), (0, 2, 1)), (4 * BK, BV // 4))
    b_own = (tl.arange(0, 4 * BK)[None, :] // 4 == tl.arange(0, BK)[:, None]).to(tl.float32)
    return tl.dot(b_own, b_x, input_precision=SUM_PRECISION)


@triton.jit
def add_sums(b_sums, b_x0, b_x1, i: tl.constexpr, SUM_PRECISION: tl.constexpr):
    """Add two :func:`sum_channels` up over the rest of the channels, on the tensor cores, to sums 2 i and 2 i + 1 of four.

    b_sums is `[v / 4 % 2, j % (BK / 2); sum, j / (BK / 2)]`, in whose layout again no value changes its thread.
    """
    BK: tl.constexpr = b_x0.shape[0]
    BN: tl.constexpr = b_x0.shape[1]
    b_x = tl.permute(tl.reshape(tl.join(b_x0, b_x1), (2, BK // 2, BN // 2, 2, 2)), (3, 1, 4, 0, 2))
    b_x = tl.reshape(b_x, (BK, 2 * BN))
    b_own = (tl.arange(0, 2 * BN)[:, None] // (BN // 2) + 4 * i == tl.arange(0, 8)[None, :]).to(tl.float32)
    return tl.dot(b_x, b_own, b_sums, input_precision=SUM_PRECISION)


@triton.jit
def four_sums(b_sums):
    """`[sum, j]` of what :func:`add_sums` returns."""
    BK: tl.constexpr = b_sums.shape[0]
    b_sums = tl.sum(tl.reshape(b_sums, (2, BK // 2, 4, 2)), 0)
    return tl.reshape(tl.permute(b_sums, (1, 2, 0)), (4, BK))


@triton.jit
def replay_block(b_h, b_keys, ns, xs, ps, OPTIONS: tl.constexpr, HAS_G: tl.constexpr):
    """The state after a block of tokens."""
    ks = unstack(b_keys)
    for u in tl.static_range(len(ks)):
        if HAS_G:
            b_h *= decays(from_word(xs[2][u], ps[2]))
        b_h = update(b_h, ks[u], step_sizes(from_word(xs[1][u], ps[1]), ns[u], OPTIONS), from_word(xs[0][u], ps[0]))
    return b_h


@triton.jit
def scaled_error(b_h, b_k, b_f, b_fv):
    """s (v - k P)"""
    return tl.fma(-(b_k * b_f), b_h, b_fv)


@triton.jit
def silu_and_slope(b_z):
    """silu(z) and its derivative."""
    b_s = sigmoid(b_z)
    b_silu = b_z * b_s
    return b_silu, b_s + b_silu * (1. - b_s)


@triton.jit
def add_earlier(b_x, p_acc, i_k, NK: tl.constexpr):
    """b_x and, of several blocks of K, the sum over the blocks before the i_k-th."""
    if NK > 1:
        b_x += tl.load(p_acc, mask=tl.full(p_acc.shape, 0, tl.int32) < i_k, other=0.)
    return b_x


@triton.jit
def backward_block(
    b_dh, b_dD, b_D, b_h, xs, ps, outs, p_row, p_sums, p_part, i_k, n_u, m_v,
    V: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr, INTERVAL: tl.constexpr, S_KQ: tl.constexpr, S_O: tl.constexpr,
    OPTIONS: tl.constexpr, SUM_PRECISION: tl.constexpr, SCALAR_BETA: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_G: tl.constexpr,
):
    """Take a block of tokens, of which n_u exist, forward from the state before it, and the state's gradient back.

    The states before each token are kept. Stores come last, because the compiler moves no load above them. Between two
    blocks of K, the sums over K are in scratch memory.
    """
    BK: tl.constexpr = b_h.shape[0]
    BV: tl.constexpr = b_h.shape[1]
    U: tl.constexpr = len(xs[0])
    PLANE: tl.constexpr = INTERVAL * BV
    p_acc = p_sums + (2 if SCALAR_BETA else 1) * PLANE
    o_k = i_k * BK + tl.arange(0, BK)
    p_k = p_row + o_k
    kept, gates, steps, dys, slopes, ys, dqs = (), (), (), (), (), (), ()
    for u in tl.static_range(U):
        o_u = row_offset(u, n_u, S_KQ)
        b_k, b_q = tl.load(p_k + o_u)[:, None], tl.load(p_k + o_u + KP)[:, None]
        b_v, b_dy, b_dsilu = from_word(xs[0][u], ps[0]), from_word(xs[3][u], ps[3]), 0.
        b_f, b_rest, b_slope = step_factors(from_word(xs[1][u], ps[1]), tl.load(p_row + o_u + 2 * KP), OPTIONS)
        if HAS_Z:
            b_silu, b_dsilu = silu_and_slope(from_word(xs[4][u], ps[4]))
            b_dy, b_dsilu = b_dy * b_silu, b_dy * b_dsilu
        if HAS_D:
            b_dD += tl.where(i_k == 0, b_dy * b_v, 0.)
        if HAS_G:
            gates = gates + (decays(from_word(xs[2][u], ps[2])),)
            b_h *= gates[u]
        b_x = scaled_error(b_h, b_k, b_f, b_f * b_v)
        kept = kept + (b_h if HAS_G else b_x,)
        b_h += (b_k * b_rest) * b_x
        ys = ys + (add_earlier(weighted_rows(b_q, b_h, 1), p_acc + 2 * PLANE + u * BV, i_k, NK if HAS_Z else 1),)
        dqs = dqs + (sum_channels(b_h * b_dy, SUM_PRECISION),)
        steps = steps + ((b_f, b_rest, b_slope, b_f * b_v),)
        dys, slopes = dys + (b_dy,), slopes + (b_dsilu,)

    b_sums = tl.zeros([BK, 8], dtype=tl.float32)
    b_dq = add_sums(b_sums, dqs[0], dqs[U - 1], 0, SUM_PRECISION)
    dus, ds, dgs, dks = (), (), (), ()
    for u in tl.static_range(U - 1, -1, -1):
        o_u = row_offset(u, n_u, S_KQ)
        # '.ca' is the default; it only stops the compiler from merging this with the earlier load: 128 registers
        b_k, b_q = tl.load(p_k + o_u, cache_modifier='.ca'), tl.load(p_k + o_u + KP, cache_modifier='.ca')
        b_k, b_q = b_k[:, None], b_q[:, None]
        b_f, b_rest, _, b_fv = steps[u]
        b_x = scaled_error(kept[u], b_k, b_f, b_fv) if HAS_G else kept[u]
        b_dh += b_q * dys[u]
        b_m = b_dh * (b_x - 0.5 * b_fv)
        p_u = p_acc + u * BV
        dus = (add_earlier(weighted_rows(b_k, b_dh, 1), p_u, i_k, NK),) + dus
        ds = (add_earlier(weighted_rows(b_k, b_m, 1), p_u + PLANE, i_k, NK),) + ds
        b_dh = tl.fma(-(b_k * (b_f * b_rest)), b_k, 1.) * b_dh
        if HAS_G:
            dgs = (add_earlier(weighted_rows(kept[u], b_dh, 1), p_u + 3 * PLANE, i_k, NK),) + dgs
            b_dh *= gates[u]
        dks = (sum_channels(b_m * b_rest, SUM_PRECISION),) + dks

    b_dk = add_sums(b_sums, dks[0], dks[U - 1], 0, SUM_PRECISION)
    o_s = tl.arange(0, 4)[:, None]
    p_s = p_part + o_s * (2 * KP + 4) + o_k[None, :]
    tl.store(p_s, four_sums(b_dq), mask=o_s < n_u)
    tl.store(p_s + KP, four_sums(b_dk), mask=o_s < n_u)
    for u in tl.static_range(U):
        if NK > 1 and i_k + 1 < NK:
            tl.store(p_acc + u * BV, dus[u])
            tl.store(p_acc + PLANE + u * BV, ds[u])
            if HAS_Z:
                tl.store(p_acc + 2 * PLANE + u * BV, ys[u])
            if HAS_G:
                tl.store(p_acc + 3 * PLANE + u * BV, dgs[u])
        else:
            b_f, b_rest, b_slope, b_fv = steps[u]
            m = m_v & (tl.full(m_v.shape, u, tl.int32) < n_u)
            b_d, b_eps = ds[u] + (0.5 * b_fv) * dus[u], b_f * b_rest
            b_dv, b_db = b_eps * dus[u], b_slope * b_d
            if HAS_D:
                b_dv += b_D * dys[u]
            tl.store(outs[0] + u * S_O, b_dv.to(outs[0].dtype.element_ty), mask=m)
            # summed over channels later
            tl.store(p_sums + u * BV, (b_eps * b_rest) * b_d)
            if SCALAR_BETA:
                tl.store(p_sums + PLANE + u * BV, b_db)
            else:
                tl.store(outs[1] + u * S_O, b_db.to(outs[1].dtype.element_ty), mask=m)
            if HAS_G:
                tl.store(outs[2] + u * S_O, dgs[u].to(outs[2].dtype.element_ty), mask=m)
            if HAS_Z:
                b_y = ys[u] + b_D * from_word(xs[0][u], ps[0]) if HAS_D else ys[u]
                tl.store(outs[3] + u * S_O, (b_y * slopes[u]).to(outs[3].dtype.element_ty), mask=m)
    return b_dh, b_dD


@triton.jit
def saved_offsets(BK: tl.constexpr, BV: tl.constexpr):
    """Offsets `[BV, BK / 4, 4]` of a state tile in scratch: a thread has a channel, of which four entries are adjacent."""
    o_v, o_r, o_4 = tl.arange(0, BV), tl.arange(0, BK // 4), tl.arange(0, 4)
    o_h = o_v[:, None, None] * 4 + o_r[None, :, None] * (4 * BV) + o_4[None, None, :]
    # the hint ranks the dimensions: without it, versions of Triton differ in which of the first two lanes follow
    return tl.max_contiguous(o_h, (2, 1, 4))


@triton.jit
def to_saved(b_h):
    BK: tl.constexpr = b_h.shape[0]
    BV: tl.constexpr = b_h.shape[1]
    return tl.permute(tl.reshape(b_h, (BK // 4, 4, BV)), (2, 0, 1))


@triton.jit
def from_saved(b_x):
    BV: tl.constexpr = b_x.shape[0]
    BK: tl.constexpr = 4 * b_x.shape[1]
    return tl.reshape(tl.permute(b_x, (1, 2, 0)), (BK, BV))
