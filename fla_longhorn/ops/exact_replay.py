"""Exact update, backward's first kernel: every interval is replayed from its saved state, all intervals at once."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.exact_common import (
    first_slot,
    forward_substitution,
    load_rows,
    operand,
    product,
    ratio,
    rounded,
    sequence_of_slot,
    sequence_range,
    sigmoid,
    split_product,
    split_product_t,
    state_mask,
    state_tile,
    tile_mask,
)


def replay_tile(K: int) -> dict:
    """Launch parameters: a thread owns `VEC` columns of a chunk, and the state fits the registers of the program."""
    BK = state_tile(K)
    BV, num_warps = {16: (64, 1), 32: (64, 1), 64: (128, 4), 128: (256, 8), 256: (128, 8)}[BK]
    return {'BK': BK, 'BV': BV, 'num_warps': num_warps, 'VEC': max(BV // (32 * num_warps), 1)}


@triton.jit
def replay_chunk(
    b_h, b_k, p_v, p_beta, p_us, p_cs, p_g, i_x, o_t, o_b, o_x, left, m_v, V: tl.constexpr, DOT: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """The forward step without its output: store what a chunk leaves for the other kernels, return the state `[BV, BK]`.

    Also returned are the rows of v and U `[BT, BV]`.
    """
    BT: tl.constexpr = o_t.shape[0]
    b_p = split_product(b_h, tl.trans(b_k), tl.zeros([b_h.shape[0], BT], dtype=tl.float32), DOT)
    # [BT, BV]; loads placed after the products keep the layout in which a thread owns columns
    b_v = tl.load(p_v + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
    b_b = load_rows(p_beta, i_x, V, o_b, o_t, left, m_v, SCALAR_BETA)
    if USE_BETA_SIGMOID:
        b_b = sigmoid(b_b)
    # [BT]
    b_n = tl.load(p_g + BT * BT + o_t)
    b_f = ratio(1.0, 1.0 + b_b * b_n[:, None])
    # [BT, BV]
    b_e = tl.broadcast_to(b_b * b_f, b_v.shape)
    b_r = forward_substitution(b_v - tl.trans(b_p), b_e, p_g, BT)
    b_u = b_r * b_e
    if SCALAR_BETA:
        tl.store(p_us + i_x * V + o_x, operand(b_r, DOT), mask=m_v)
    else:
        tl.store(p_us + i_x * V + o_x, operand(b_u, DOT), mask=m_v)
        b_c = b_r * b_f * b_f
        if USE_BETA_SIGMOID:
            b_c *= b_b * (1.0 - b_b)
        tl.store(p_cs + i_x * V + o_x, rounded(b_c, p_cs.dtype.element_ty), mask=m_v)
    return split_product_t(b_u, b_k, b_h, DOT), b_v, b_u


@triton.jit
def gate_gradients(
    b_o, b_u, b_v, b_D, b_dD, p_a, do, z, dy, dz, o_x, m_v, scale, DOT: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
):
    """Store the gradients of the gate and of what it gates, and add up that of D; `b_o` is `(Q S)^T`."""
    BT: tl.constexpr = b_u.shape[0]
    b_do = tl.load(do + o_x, mask=m_v, other=0.0).to(tl.float32)
    if HAS_Z:
        o_t = tl.arange(0, BT)
        b_a = tl.load(p_a + o_t[:, None] * BT + o_t[None, :])
        # `a` holds the scale
        b_y = tl.trans(product(tl.trans(operand(b_u, DOT)), b_a, scale * b_o, DOT))
        if HAS_D:
            b_y += b_D[None, :] * b_v
        b_z = tl.load(z + o_x, mask=m_v, other=0.0).to(tl.float32)
        b_sig = sigmoid(b_z)
        b_dz = b_do * b_y * (b_sig * (1.0 + b_z * (1.0 - b_sig)))
        tl.store(dz + o_x, rounded(b_dz, dz.dtype.element_ty), mask=m_v)
        b_do *= b_z * b_sig
        tl.store(dy + o_x, rounded(b_do, dy.dtype.element_ty), mask=m_v)
    if HAS_D:
        b_dD += tl.sum(b_do * b_v, 0)
    return b_dD


@triton.heuristics({
    'HAS_D': lambda args: args['D'] is not None,
    'HAS_Z': lambda args: args['z'] is not None,
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'A_PARTS': lambda args: 1 if args['DOT'] == 'ieee' else 2,
})
@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_replay(
    q,
    k,
    v,
    beta,
    D,
    z,
    do,
    g,
    a,
    states,
    us,
    cs,
    hs,
    dD,
    dy,
    dz,
    cu_seqlens,
    scale,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    INTERVAL: tl.constexpr,
    SPAN: tl.constexpr,
    DOT: tl.constexpr,
    A_PARTS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    r"""One block of channels of one interval, forwards: the residuals and steps of its tokens, the states of its spans.

    With the letters of the forward kernel, `us` takes U and `cs` what dbeta multiplies X with,
    :math:`R / (1 + \beta |k|^2)^2`; `us` takes R of a scalar step, which needs no `cs`. With z or D, the gradients that
    concern a token's output alone are taken here too: `dz`, `dy` of what is gated, and this interval's part of `dD`.
    """
    i_v, i_h, i_c = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_n = sequence_of_slot(cu_seqlens, i_c, T, N, INTERVAL, IS_VARLEN)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    # the interval's tokens: none in a slot that no sequence uses
    bos_i = (i_c - first_slot(bos, i_n, T, INTERVAL, IS_VARLEN)) * INTERVAL
    T_i = tl.maximum(tl.minimum(T_n - bos_i, INTERVAL), 0).to(tl.int32)
    NT = T_i // BT

    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    # what a thread may load at once decides which columns it owns
    o_v = tl.multiple_of(i_v * BV + tl.arange(0, BV), VEC)
    m_h = state_mask(o_k, o_v, K, V, BV)
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    # int64, so that a row's offset is a constant of the load
    o_x = o_t[:, None].to(tl.int64) * (H * V) + o_v[None, :]
    o_b = o_t[:, None] * H if SCALAR_BETA else o_x
    o_h = o_v[:, None] * K + o_k[None, :]

    i_x = (bos + bos_i) * H + i_h
    i_g = (first_slot(bos, i_n, T, BT, IS_VARLEN) + bos_i // BT) * H + i_h
    p_hs = hs + ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + bos_i // SPAN) * H + i_h) * (K * V)
    p_s = states + (i_c.to(tl.int64) * H + i_h) * (K * V)
    b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32) if HAS_D else None
    b_dD = tl.zeros([BV], dtype=tl.float32) if HAS_D else None
    # [BV, BK]
    b_h = tl.load(p_s + o_k[None, :].to(tl.int64) * V + o_v[:, None], mask=m_h & (o_v * 0 < T_i)[:, None], other=0.0)
    for i_s in range(tl.cdiv(NT, SPAN // BT)):
        tl.store(p_hs + o_h, rounded(b_h, hs.dtype.element_ty), mask=m_h)
        p_hs += H * K * V
        for _ in tl.range(i_s * (SPAN // BT), tl.minimum((i_s + 1) * (SPAN // BT), NT), num_stages=1):
            b_k = tl.load(k + i_x * K + o_qk, mask=tile_mask(o_t, o_k, BT, K, BK, False), other=0.0)
            m_v = tile_mask(o_t, o_v, BT, V, BV, False)
            if HAS_Z:
                b_q = tl.load(q + i_x * K + o_qk, mask=tile_mask(o_t, o_k, BT, K, BK, False), other=0.0)
                b_o = product(b_h, tl.trans(b_q), tl.zeros([BV, BT], dtype=tl.float32), DOT)
            else:
                b_o = None
            b_h, b_v, b_u = replay_chunk(
                b_h, b_k, v, beta, us, cs, g + i_g * ((BT + 1) * BT), i_x, o_t, o_b, o_x, BT, m_v, V, DOT,
                USE_BETA_SIGMOID, SCALAR_BETA,
            )
            if HAS_D or HAS_Z:
                b_dD = gate_gradients(
                    b_o, b_u, b_v, b_D, b_dD, a + i_g * (A_PARTS * BT * BT), do, z, dy, dz, i_x * V + o_x, m_v, scale,
                    DOT, HAS_D, HAS_Z,
                )
            i_x += BT * H
            i_g += H
    # the tokens after the last full chunk
    left = T_i - NT * BT
    if left > 0:
        if NT % (SPAN // BT) == 0:
            tl.store(p_hs + o_h, rounded(b_h, hs.dtype.element_ty), mask=m_h)
        b_k = tl.load(k + i_x * K + o_qk, mask=tile_mask(o_t, o_k, left, K, BK, True), other=0.0)
        m_v = tile_mask(o_t, o_v, left, V, BV, True)
        if HAS_Z:
            b_q = tl.load(q + i_x * K + o_qk, mask=tile_mask(o_t, o_k, left, K, BK, True), other=0.0)
            b_o = product(b_h, tl.trans(b_q), tl.zeros([BV, BT], dtype=tl.float32), DOT)
        else:
            b_o = None
        b_h, b_v, b_u = replay_chunk(
            b_h, b_k, v, beta, us, cs, g + i_g * ((BT + 1) * BT), i_x, o_t, o_b, o_x, left, m_v, V, DOT, USE_BETA_SIGMOID,
            SCALAR_BETA,
        )
        if HAS_D or HAS_Z:
            b_dD = gate_gradients(
                b_o, b_u, b_v, b_D, b_dD, a + i_g * (A_PARTS * BT * BT), do, z, dy, dz, i_x * V + o_x, m_v, scale,
                DOT, HAS_D, HAS_Z,
            )
    if HAS_D:
        tl.store(dD + (i_c.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=o_v < V)
