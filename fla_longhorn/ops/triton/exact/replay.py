"""Exact update, backward's first kernel: every interval is replayed from its saved state, all intervals at once."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.exact.common import (
    add_updates,
    chunk_tile,
    first_slot,
    forward_substitution,
    head_and_index,
    load_rows,
    operand,
    product,
    ratio,
    rounded,
    sequence_of_slot,
    sequence_range,
    sigmoid,
    split_product,
    state_mask,
    step_sizes,
    tile_mask,
)


def replay_tile(K: int, precision: str) -> dict:
    """Launch parameters; without loads ahead, one warp has registers for K = 32."""
    tile = chunk_tile(K, precision)
    return {**tile, 'num_warps': 1, 'VEC': 2} if tile['BK'] == 32 else tile


@triton.jit
def replay_chunk(
    b_h, b_dD, b_k, p_q, b_D, p_v, p_beta, p_us, p_cs, p_do, p_z, p_dy, p_dz, p_g, p_a, i_x, o_t, o_b, o_x, left, m_v, m_k,
    scale, V: tl.constexpr, DOT: tl.constexpr, USE_BETA_SIGMOID: tl.constexpr, SCALAR_BETA: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_SCALE: tl.constexpr,
):
    """The forward step: store what a chunk leaves for the other kernels, return the state `[BV, BK]` and the sum of dD."""
    BT: tl.constexpr = o_t.shape[0]
    b_zero = tl.zeros([b_h.shape[0], BT], dtype=tl.float32)
    b_p = split_product(b_h, tl.trans(b_k), b_zero, DOT)
    # [BT, BV]; loads placed after the products keep the layout in which a thread owns columns
    b_v = tl.load(p_v + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
    b_b = load_rows(p_beta, i_x, V, o_b, o_t, left, m_v, SCALAR_BETA)
    # [BT]
    b_n = tl.load(p_g + BT * BT + o_t)
    if USE_BETA_SIGMOID:
        b_e = step_sizes(b_b, b_n[:, None], True)
    else:
        b_f = ratio(1.0, 1.0 + b_b * b_n[:, None])
        b_e = b_b * b_f
    # [BT, BV]
    b_e = tl.broadcast_to(b_e, b_v.shape)
    b_r = forward_substitution(b_v - tl.trans(b_p), b_e, p_g, BT, DOT, False)
    b_u = b_r * b_e
    if SCALAR_BETA:
        tl.store(p_us + i_x * V + o_x, operand(b_r, DOT), mask=m_v)
    else:
        tl.store(p_us + i_x * V + o_x, operand(b_u, DOT), mask=m_v)
        if not USE_BETA_SIGMOID:
            tl.store(p_cs + i_x * V + o_x, rounded(b_r * b_f * b_f, p_cs.dtype.element_ty), mask=m_v)
    if HAS_Z:
        # (Q S)^T, not before the substitution, which needs the registers
        b_q = tl.load(p_q, mask=m_k, other=0.0)
        b_o = product(b_h, tl.trans(b_q), b_zero, DOT)
        if HAS_SCALE:
            b_o *= scale
    else:
        b_o = b_zero
    b_h, b_o = add_updates(b_h, b_o, b_u, b_k, p_a, DOT, True, HAS_Z)
    if HAS_D or HAS_Z:
        b_dD = gate_gradients(
            b_o, b_D, b_dD, p_v + i_x * V + o_x, p_do + i_x * V + o_x, p_z + i_x * V + o_x if HAS_Z else None,
            p_dy + i_x * V + o_x if HAS_Z else None, p_dz + i_x * V + o_x if HAS_Z else None, m_v, HAS_D, HAS_Z,
        )
    return b_h, b_dD


@triton.jit
def gate_gradients(b_o, b_D, b_dD, p_v, p_do, p_z, p_dy, p_dz, m_v, HAS_D: tl.constexpr, HAS_Z: tl.constexpr):
    """Store the gradients of the gate and of what it gates, and add up that of D; `b_o` is `(scale O)^T`."""
    # [BT, BV]; v is loaded again, for registers don't hold it so long
    b_do = tl.load(p_do, mask=m_v, other=0.0).to(tl.float32)
    if HAS_D:
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    if HAS_Z:
        b_y = tl.trans(b_o)
        if HAS_D:
            b_y += b_D[None, :] * b_v
        b_z = tl.load(p_z, mask=m_v, other=0.0).to(tl.float32)
        b_sig = sigmoid(b_z)
        # dz = do y (sig + silu (1 - sig))
        b_dz = b_do * b_y
        b_silu = b_z * b_sig
        b_dz *= b_sig + b_silu * (1.0 - b_sig)
        tl.store(p_dz, rounded(b_dz, p_dz.dtype.element_ty), mask=m_v)
        b_do *= b_silu
        tl.store(p_dy, rounded(b_do, p_dy.dtype.element_ty), mask=m_v)
    if HAS_D:
        b_dD += tl.sum(b_do * b_v, 0)
    return b_dD


@triton.heuristics({
    'HAS_D': lambda args: args['D'] is not None,
    'HAS_Z': lambda args: args['z'] is not None,
    'HAS_SCALE': lambda args: args['scale'] != 1.0,
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
    HAS_SCALE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    r"""One block of channels of one interval, forwards: the residuals and steps of its tokens, the states of its spans.

    With the letters of the forward kernel, `us` takes U and `cs` what dbeta multiplies X with,
    :math:`R / (1 + \beta |k|^2)^2`; `us` takes R of a scalar step, which needs no `cs`, nor do logits. With z or D, the
    gradients that concern a token's output alone are taken here too: `dz`, `dy` of what is gated, and this interval's part
    of `dD`.
    """
    i_h, i_c = head_and_index(H)
    i_v = tl.program_id(1)
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
    b_dD = tl.zeros([BV], dtype=tl.float32)
    # [BV, BK]
    b_h = tl.load(p_s + o_h, mask=m_h & (o_v * 0 < T_i)[:, None], other=0.0)
    for i_s in range(tl.cdiv(NT, SPAN // BT)):
        tl.store(p_hs + o_h, rounded(b_h, hs.dtype.element_ty), mask=m_h)
        p_hs += H * K * V
        for _ in tl.range(i_s * (SPAN // BT), tl.minimum((i_s + 1) * (SPAN // BT), NT), num_stages=1):
            m_k, m_v = tile_mask(o_t, o_k, BT, K, BK, False), tile_mask(o_t, o_v, BT, V, BV, False)
            b_k = tl.load(k + i_x * K + o_qk, mask=m_k, other=0.0)
            b_h, b_dD = replay_chunk(
                b_h, b_dD, b_k, q + i_x * K + o_qk, b_D, v, beta, us, cs, do, z, dy, dz, g + i_g * ((BT + 1) * BT),
                a + i_g * (A_PARTS * BT * BT), i_x, o_t, o_b, o_x, BT, m_v, m_k, scale, V, DOT, USE_BETA_SIGMOID,
                SCALAR_BETA, HAS_D, HAS_Z, HAS_SCALE,
            )
            i_x += BT * H
            i_g += H
    # the tokens after the last full chunk
    left = T_i - NT * BT
    if left > 0:
        if NT % (SPAN // BT) == 0:
            tl.store(p_hs + o_h, rounded(b_h, hs.dtype.element_ty), mask=m_h)
        m_k, m_v = tile_mask(o_t, o_k, left, K, BK, True), tile_mask(o_t, o_v, left, V, BV, True)
        b_k = tl.load(k + i_x * K + o_qk, mask=m_k, other=0.0)
        b_h, b_dD = replay_chunk(
            b_h, b_dD, b_k, q + i_x * K + o_qk, b_D, v, beta, us, cs, do, z, dy, dz, g + i_g * ((BT + 1) * BT),
            a + i_g * (A_PARTS * BT * BT), i_x, o_t, o_b, o_x, left, m_v, m_k, scale, V, DOT, USE_BETA_SIGMOID,
            SCALAR_BETA, HAS_D, HAS_Z, HAS_SCALE,
        )
    if HAS_D:
        tl.store(dD + (i_c.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=o_v < V)
