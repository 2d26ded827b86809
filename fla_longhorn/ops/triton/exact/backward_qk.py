"""Exact update, the last kernel of backward: sums over channels, which are dq and dk (and dbeta of a scalar step)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fla_longhorn.ops.triton.common import FUSED, LOG2E, given, norm_slope, step_factors
from fla_longhorn.ops.triton.exact.common import head_and_index, product, rounded, split, split_product, tile_pointers
from fla_longhorn.ops.triton.exact.configs import for_products, state_parts
from fla_longhorn.ops.triton.launch import LaunchKey
from fla_longhorn.ops.triton.slots import locate_slot


@triton.jit
def squares(p_k, m_t, K: tl.constexpr, BK: tl.constexpr):
    """`|k|^2 [BT]` of the keys at `p_k [BT, 1]`."""
    b_n = tl.zeros([p_k.shape[0]], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_k = tl.load(p_k + o_k[None, :], mask=m_t[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
        b_n += tl.sum(b_k * b_k, 1)
    return b_n


@triton.constexpr_function
def doublings(size):
    return size.bit_length() - 1


@triton.jit
def decays_between(b_m, b_g, DOT: tl.constexpr):
    """`[BT, BV]`: for each token, the product of the decays of the tokens that its row of `b_m [BT, BT]` has ones for."""
    b_zero = tl.zeros(b_g.shape, dtype=tl.float32)
    b_m = tl.where(b_m, 1.0, 0.0)
    if DOT == 'ieee':
        return tl.exp2(product(b_m, b_g, b_zero, DOT))
    else:
        b_hi, b_lo = split(b_g, DOT)
        return tl.exp2(product(b_m, b_hi, product(b_m, b_lo, b_zero, DOT), DOT))


@triton.jit
def decayed_pairs(b_dy, b_w, b_u, b_g, b_da, b_m, DOT: tl.constexpr):
    r"""Add dA and M of decayed U: token s's decays with :math:`e^{g_{s+1} + \dots + g_t}` until it meets t's dY or W.

    By halves: in each block of 2, 4, ... tokens, those of the first half decay to its end, and those of the second from there.
    So no factor is above one. `b_g` is in powers of two and finite.
    """
    BT: tl.constexpr = b_dy.shape[0]
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_zero = tl.zeros([BT, BT], dtype=tl.float32)
    b_ut = tl.trans(b_u)
    b_da += tl.where(o_i == o_j, product(b_dy, b_ut, b_zero, DOT), 0.0)
    b_m += tl.where(o_i == o_j, product(b_w, b_ut, b_zero, DOT), 0.0)
    b_dy, b_w, b_u = b_dy.to(tl.float32), b_w.to(tl.float32), b_u.to(tl.float32)
    for level in tl.static_range(doublings(BT)):
        # the first token of the second half
        o_mid = (o_i >> (level + 1) << (level + 1)) + (1 << level)
        between = ((o_j >= o_mid) & (o_j <= o_i)) | ((o_j > o_i) & (o_j < o_mid))
        b_d = decays_between(between, b_g, DOT)
        b_ut = tl.trans(b_u * b_d)
        pairs = (o_i >= o_mid) & (o_j < o_mid) & (o_j >= o_mid - (1 << level))
        b_da += tl.where(pairs, product(b_dy * b_d, b_ut, b_zero, DOT), 0.0)
        b_m += tl.where(pairs, product(b_w * b_d, b_ut, b_zero, DOT), 0.0)
    return b_da, b_m


@triton.heuristics({'HAS_SCALE': lambda args: args['scale'] != 1.0, **given(HAS_G='g', IS_VARLEN='cu_seqlens')})
@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_qk(
    q, k, beta, g, dy, us, ws, hs, dhs, dq, dk, dbeta, cu_seqlens, scale, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S_Q: tl.constexpr, S_K: tl.constexpr, S_B: tl.constexpr,
    S_G: tl.constexpr, S_DY: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr,
    DOT: tl.constexpr, HAS_SCALE: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr,
    HAS_G: tl.constexpr, IS_VARLEN: tl.constexpr,
):
    r"""dq and dk of one span of `BT` tokens, summed over blocks of channels.

    With `S` the state at the span's start and `dS` the gradient of the state at its end:

    .. math::
        dQ = dY S^\top + dA\,K, \quad dK = dA^\top Q + U dS^\top - W S^\top - (M + M^\top) K, \quad
        dA = \mathrm{tril}(dY U^\top), \quad M = \mathrm{tril}(W U^\top)

    The diagonal of M, :math:`\sum_v d\epsilon\,\epsilon^2`, times :func:`norm_slope` is the gradient through
    :math:`|k|^2`. For a scalar step, `us` and `ws` hold R and X, and the sums over channels are multiplied by the step sizes
    of their rows. With g, S decays to each token and dS back to it, and U from one to the other. A program
    computes `BK` entries of dq and dk; each program of a span computes dA and M.
    """
    i_h, i_c = head_and_index(H)
    i_k = tl.program_id(1)
    _, bos, T_n, i_t = locate_slot(cu_seqlens, i_c, T, N, BT, IS_VARLEN)
    i_t = i_t.to(tl.int32)
    if i_t < T_n:
        o_t, o_k, o_v = tl.arange(0, BT), i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
        m_t = i_t + o_t < T_n
        m_k = m_t[:, None] & (o_k < K)[None, :]
        i_x = (bos + i_t) * H + i_h
        o_qk = i_x * K + o_t[:, None] * (H * K) + o_k[None, :]
        o_x = i_x * V + o_t[:, None] * (H * V) + o_v[None, :]
        p_dy = tile_pointers(dy + i_h * V, S_DY, bos + i_t, o_t, o_v)
        o_h = (i_c.to(tl.int64) * H + i_h) * (PARTS * K * V) + o_v[:, None] * K + o_k[None, :]
        # [BT, BK]
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        b_dw = tl.zeros([BT, BK], dtype=tl.float32)
        # [BT, BT]
        b_da = tl.zeros([BT, BT], dtype=tl.float32)
        b_m = tl.zeros([BT, BT], dtype=tl.float32)
        if HAS_G:
            o_g = tl.arange(0, 1) if SCALAR_G else o_v
            p_g = tile_pointers(g + (i_h if SCALAR_G else i_h * V), S_G, bos + i_t, o_t, o_g)
        for i_v in range(0, V, BV):
            m_v = m_t[:, None] & (i_v + o_v < V)[None, :]
            m_h = (i_v + o_v < V)[:, None] & (o_k < K)[None, :]
            # [BT, BV]
            b_dy = tl.load(p_dy, mask=m_v, other=0.0)
            b_u = tl.load(us + o_x, mask=m_v, other=0.0)
            b_w = tl.load(ws + o_x, mask=m_v, other=0.0)
            if HAS_G:
                b_g = tl.load(p_g, mask=m_t[:, None] & (i_v + o_g < V)[None, :], other=0.0).to(tl.float32)
                # 2^-150 is zero in float32 already, so lower logarithms are raised to -150
                b_g = tl.broadcast_to(tl.maximum(b_g * LOG2E, -150.0), b_dy.shape)
                b_da, b_m = decayed_pairs(b_dy, b_w, b_u, b_g, b_da, b_m, DOT)
                b_until = decays_between(o_t[:, None] >= o_t[None, :], b_g, DOT)
                b_dy, b_w = b_dy.to(tl.float32) * b_until, b_w.to(tl.float32) * b_until
                b_u = b_u.to(tl.float32) * decays_between(o_t[:, None] < o_t[None, :], b_g, DOT)
                if not SCALAR_G:
                    p_g += BV
            for part in tl.static_range(PARTS):
                # [BV, BK]
                b_h = tl.load(hs + part * (K * V) + o_h, mask=m_h, other=0.0)
                b_dh = tl.load(dhs + part * (K * V) + o_h, mask=m_h, other=0.0)
                b_dq = product(b_dy, b_h, b_dq, DOT)
                b_dw = product(b_w, b_h, b_dw, DOT)
                b_dk = product(b_u, b_dh, b_dk, DOT)
            if not HAS_G:
                b_u = tl.trans(b_u)
                b_da = product(b_dy, b_u, b_da, DOT)
                b_m = product(b_w, b_u, b_m, DOT)
            o_x += BV
            p_dy += BV
            o_h += BV * K
        q, k = q + i_h * K, k + i_h * K
        b_q = tl.load(tile_pointers(q, S_Q, bos + i_t, o_t, o_k), mask=m_k, other=0.0)
        b_k = tl.load(tile_pointers(k, S_K, bos + i_t, o_t, o_k), mask=m_k, other=0.0)
        if SCALAR_BETA:
            b_b = tl.load(beta + i_h + (bos + i_t + o_t) * S_B, mask=m_t, other=0.0).to(tl.float32)
            b_n = squares(k + (bos + i_t + o_t)[:, None] * S_K, m_t, K, BK)
            b_s, b_r, b_slope = step_factors(b_b, b_n, OPTIONS)
            b_db = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_m, 0.0), 1) * b_s * b_slope
            tl.store(dbeta + i_x + o_t * H, rounded(b_db, dbeta.dtype.element_ty), mask=m_t & (o_t * 0 == i_k))
            b_e = b_s * b_r
            b_m *= b_e[:, None] * b_e[None, :]
            b_da *= b_e[None, :]
            b_dk = (b_dk - b_dw) * b_e[:, None]
        else:
            b_dk -= b_dw
        if HAS_SCALE:
            b_dq *= scale
            b_da *= scale
        if norm_slope(OPTIONS) != 1:
            b_m = tl.where(o_t[:, None] == o_t[None, :], b_m * norm_slope(OPTIONS), b_m)
        lower = o_t[:, None] >= o_t[None, :]
        b_da = tl.where(lower, b_da, 0.0)
        b_m = tl.where(lower, b_m, 0.0)
        b_dq = split_product(b_da, b_k, b_dq, DOT)
        b_dk = split_product(tl.trans(b_da), b_q, b_dk, DOT)
        b_dk = split_product(-(b_m + tl.trans(b_m)), b_k, b_dk, DOT)
        tl.store(dq + o_qk, rounded(b_dq, dq.dtype.element_ty), mask=m_k)
        tl.store(dk + o_qk, rounded(b_dk, dk.dtype.element_ty), mask=m_k)


def chunk_longhorn_exact_bwd_qk(
    q: Tensor, k: Tensor, beta: Tensor, g: Tensor | None, dy: Tensor, us: Tensor, ws: Tensor, hs: Tensor, dhs: Tensor,
    dbeta: Tensor, cu_seqlens: Tensor | None, scale: float, key: LaunchKey, flags: dict[str, Any],
    strides: dict[str, int],
) -> tuple[Tensor, Tensor]:
    """Return dq and dk from the tokens' dY, U and W and the spans' S and dS; store dbeta of a scalar step."""
    T, H, K = q.shape[1:]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kernel, precision = chunk_longhorn_exact_bwd_kernel_qk, key.precision
    config = for_products(key, g is not None)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    kernel[(H * hs.shape[0], triton.cdiv(K, config.BK))](
        q, k, beta, g, dy, us, ws, hs, dhs, dq, dk, dbeta, cu_seqlens, scale, T, N, H=H, K=K, V=us.shape[-1],
        PARTS=state_parts(K, precision, g is not None), DOT=precision, **flags, **strides, **config.of(kernel), **FUSED,
    )
    return dq, dk
