"""Exact update, the last kernel of backward: sums over channels, which are dq, dk and what is one per head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.triton.common import FUSED, decays, is_scalar, log2e, norm_slope, step_factors
from fla_longhorn.ops.triton.exact.common import (
    Strides,
    head_and_index,
    load_tile,
    product,
    rounded,
    row,
    split,
    split_product,
    store_tile,
)
from fla_longhorn.ops.triton.exact.configs import for_products, state_parts
from fla_longhorn.ops.triton.exact.gram import decays_between
from fla_longhorn.ops.triton.launch import LaunchKey
from fla_longhorn.ops.triton.slots import locate_slot, num_slots


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
def decays_of(b_m, b_g, DOT: tl.constexpr):
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
        b_d = decays_of(between, b_g, DOT)
        b_ut = tl.trans(b_u * b_d)
        pairs = (o_i >= o_mid) & (o_j < o_mid) & (o_j >= o_mid - (1 << level))
        b_da += tl.where(pairs, product(b_dy * b_d, b_ut, b_zero, DOT), 0.0)
        b_m += tl.where(pairs, product(b_w * b_d, b_ut, b_zero, DOT), 0.0)
    return b_da, b_m


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_qk(
    q,
    k,
    beta,
    g,
    dy,
    us,
    ws,
    hs,
    dhs,
    dq,
    dk,
    dbeta,
    dg,
    cu_seqlens,
    scale,
    s_dg,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
):
    r"""dq and dk of one span of `BT` tokens, summed over blocks of channels.

    With `S` the state at the span's start and `dS` the gradient of the state at its end:

    .. math::
        dQ = dY S^\top + dA\,K, \quad dK = dA^\top Q + U dS^\top - W S^\top - (M + M^\top) K, \quad
        dA = \mathrm{tril}(dY U^\top), \quad M = \mathrm{tril}(W U^\top)

    The diagonal of M, :math:`\sum_v d\epsilon\,\epsilon^2`, times :func:`norm_slope` is the gradient through
    :math:`|k|^2`. For a scalar step, `us` and `ws` hold R and X, and the sums over channels are multiplied by the step sizes
    of their rows. With g, S decays to each token and dS back to it, and U from one to the other: one per head multiplies the
    sums. Its gradient is :math:`\sum dS\,S` at the span's end, and from one token to the one before it grows by what
    queries and keys read, `q dq` and `k` times its gradient as what reads, less that as what writes.

    A program computes `BK` entries of dq and dk and their part of dg; each program of a span computes dA and M.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    PER_CHANNEL: tl.constexpr = g is not None and not SCALAR_G
    i_h, i_c = head_and_index(H)
    i_k = tl.program_id(1)
    i_n, bos, T_n, i_t = locate_slot(cu_seqlens, i_c, T, N, BT, IS_VARLEN)
    i_t = i_t.to(tl.int32)
    if i_t < T_n:
        left = T_n - i_t
        o_t, o_k, o_v = tl.arange(0, BT), i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
        m_t = o_t < left
        i_x = bos + i_t
        q, k, dq, dk = q + i_h * K, k + i_h * K, dq + i_h * K, dk + i_h * K
        o_x = (i_x * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
        p_dy = dy + i_h * V + i_x * S.do + o_t[:, None] * S.do + o_v[None, :]
        o_h = (i_c.to(tl.int64) * H + i_h) * (PARTS * K * V) + o_v[:, None] * K + o_k[None, :]
        # [BT, BK]
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_col = tl.zeros([BT, BK], dtype=tl.float32)
        b_row = tl.zeros([BT, BK], dtype=tl.float32)
        # [BT, BT]
        b_da = tl.zeros([BT, BT], dtype=tl.float32)
        b_m = tl.zeros([BT, BT], dtype=tl.float32)
        if PER_CHANNEL:
            p_g = g + i_h * V + i_x * S.g + o_t[:, None] * S.g + o_v[None, :]
        if SCALAR_G:
            # the state behind the span, and its part of dg
            i_end = tl.where(left > BT, i_c + 1, num_slots(T, N, BT, IS_VARLEN) + i_n)
            p_end = hs + (i_end * H + i_h) * (PARTS * K * V) + o_v[:, None] * K + o_k[None, :]
            b_sum = tl.zeros([BV, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            m_v = m_t[:, None] & (i_v + o_v < V)[None, :]
            m_h = (i_v + o_v < V)[:, None] & (o_k < K)[None, :]
            # [BT, BV]
            b_dy = tl.load(p_dy, mask=m_v, other=0.0)
            b_u = tl.load(us + o_x, mask=m_v, other=0.0)
            b_w = tl.load(ws + o_x, mask=m_v, other=0.0)
            if PER_CHANNEL:
                # 2^-150 is zero in float32 already, so lower logarithms are raised to -150
                b_g = tl.maximum(tl.load(p_g, mask=m_v, other=0.0).to(tl.float32) * log2e(), -150.0)
                b_da, b_m = decayed_pairs(b_dy, b_w, b_u, b_g, b_da, b_m, DOT)
                b_until = decays_of(o_t[:, None] >= o_t[None, :], b_g, DOT)
                b_dy, b_w = b_dy.to(tl.float32) * b_until, b_w.to(tl.float32) * b_until
                b_u = b_u.to(tl.float32) * decays_of(o_t[:, None] < o_t[None, :], b_g, DOT)
                p_g += BV
            b_end, b_dend = 0.0, 0.0
            for part in tl.static_range(PARTS):
                # [BV, BK]
                b_h = tl.load(hs + part * (K * V) + o_h, mask=m_h, other=0.0)
                b_dh = tl.load(dhs + part * (K * V) + o_h, mask=m_h, other=0.0)
                b_dq = product(b_dy, b_h, b_dq, DOT)
                b_row = product(b_w, b_h, b_row, DOT)
                b_col = product(b_u, b_dh, b_col, DOT)
                if SCALAR_G:
                    b_end += tl.load(p_end + part * (K * V), mask=m_h, other=0.0).to(tl.float32)
                    b_dend += b_dh.to(tl.float32)
            if SCALAR_G:
                b_sum += b_end * b_dend
                p_end += BV * K
            if not PER_CHANNEL:
                b_u = tl.trans(b_u)
                b_da = product(b_dy, b_u, b_da, DOT)
                b_m = product(b_w, b_u, b_m, DOT)
            o_x += BV
            p_dy += BV
            o_h += BV * K
        b_q, b_k = load_tile(q, S.q, i_x, o_t, o_k, left, K), load_tile(k, S.k, i_x, o_t, o_k, left, K)
        if SCALAR_G:
            b_g = tl.load(g + i_h + (i_x + o_t) * S.g, mask=m_t, other=0.0)
            b_d = decays_between(b_g)
            b_until = decays(tl.cumsum(b_g.to(tl.float32), 0))[:, None]
            b_dq, b_row, b_col = b_dq * b_until, b_row * b_until, b_col * row(b_d, b_d.shape[0] - 1)[:, None]
            b_da *= b_d
            b_m *= b_d
        # [BT]
        b_diagonal = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_m, 0.0), 1)
        if SCALAR_BETA:
            b_beta = tl.load(beta + i_h + (i_x + o_t) * S.beta, mask=m_t, other=0.0).to(tl.float32)
            b_f, b_rest, b_slope = step_factors(b_beta, squares(k + (i_x + o_t)[:, None] * S.k, m_t, K, BK), OPTIONS)
            b_dbeta = rounded(b_diagonal * b_f * b_slope, dbeta.dtype.element_ty)
            tl.store(dbeta + i_h + (i_x + o_t) * H, b_dbeta, mask=m_t & (o_t * 0 == i_k))
            b_e = b_f * b_rest
            b_diagonal *= b_e * b_e
            b_m *= b_e[:, None] * b_e[None, :]
            b_da *= b_e[None, :]
            b_row, b_col = b_row * b_e[:, None], b_col * b_e[:, None]
        if scale is not None:
            b_dq *= scale
            b_da *= scale
        b_da = tl.where(o_t[:, None] >= o_t[None, :], b_da, 0.0)
        b_m = tl.where(o_t[:, None] > o_t[None, :], b_m, 0.0)
        b_dq = split_product(b_da, b_k, b_dq, DOT)
        b_row = split_product(b_m, b_k, b_row, DOT)
        b_col = split_product(tl.trans(b_da), b_q, b_col, DOT)
        b_col = split_product(-tl.trans(b_m), b_k, b_col, DOT)
        store_tile(dq, H * K, i_x, o_t, o_k, left, K, b_dq)
        b_k = b_k.to(tl.float32)
        b_dk = b_col - b_row - 2 * norm_slope(OPTIONS) * b_diagonal[:, None] * b_k
        store_tile(dk, H * K, i_x, o_t, o_k, left, K, b_dk)
        if SCALAR_G:
            b_dg = tl.cumsum(tl.sum(b_q.to(tl.float32) * b_dq - b_k * (b_row + b_col), 1), 0, reverse=True)
            # exactly 0 where nothing is left
            b_dg = tl.where(b_g > -150.0, b_dg + tl.sum(b_sum), 0.0)
            tl.store(dg + i_k * s_dg + i_h + (i_x + o_t) * H, b_dg, mask=m_t)


def chunk_longhorn_exact_bwd_qk(
    args: Arguments, dy: Tensor, us: Tensor, ws: Tensor, hs: Tensor, dhs: Tensor, dbeta: Tensor, scale: float | None,
    key: LaunchKey, strides: Strides,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dq, dk and the dg of one per head from the tokens' dY, U and W and the spans' S and dS; store a scalar dbeta."""
    q, k, g = args.q, args.k, args.g
    B, T, H, K, V = args.sizes
    per_channel = g is not None and not is_scalar(g)
    config = for_products(key, per_channel)
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    blocks = triton.cdiv(K, config.BK)
    dg = q.new_empty((blocks, B, T, H), dtype=torch.float32) if is_scalar(g) else None
    kernel = chunk_longhorn_exact_bwd_kernel_qk
    kernel[(H * dhs.shape[0], blocks)](
        q=q,
        k=k,
        beta=args.beta,
        g=g,
        dy=dy,
        us=us,
        ws=ws,
        hs=hs,
        dhs=dhs,
        dq=dq,
        dk=dk,
        dbeta=dbeta,
        dg=dg,
        cu_seqlens=args.cu_seqlens,
        scale=scale,
        s_dg=B * T * H,
        T=T,
        N=args.num_sequences,
        H=H,
        K=K,
        V=V,
        S=strides,
        PARTS=state_parts(key, per_channel),
        DOT=key.precision,
        OPTIONS=args.step_options,
        SCALAR_BETA=args.beta.dim() == 3,
        SCALAR_G=is_scalar(g),
        **config.of(kernel),
        **FUSED,
    )
    return dq, dk, None if dg is None or g is None else dg.sum(0).to(g.dtype)
