"""Exact update, chunkwise backward: two substitutions per chunk of 16 tokens, everything else matrix products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.exact_bwd_qk import chunk_longhorn_exact_bwd_qk
from fla_longhorn.ops.exact_common import (
    CHUNK_SIZE,
    chunk_slots,
    first_slot,
    forward_substitution,
    load_rows,
    operand,
    operand_precision,
    product,
    ratio,
    reverse_substitution,
    rounded,
    sequence_range,
    sigmoid,
    split_product,
    split_product_t,
    state_offsets,
    state_tile,
    tile_mask,
)
from fla_longhorn.ops.exact_gram import chunk_longhorn_exact_gram


def backward_tile(K: int) -> dict:
    """Launch parameters: the gradient of the state and two tiles `[BT, BV]` fit the registers of the program."""
    BK = state_tile(K)
    BV, num_warps = {16: (128, 2), 32: (64, 2), 64: (128, 4), 128: (128, 4), 256: (128, 8)}[BK]
    return {'BK': BK, 'BV': BV, 'num_warps': num_warps, 'VEC': max(BV // (32 * num_warps), 1)}


@triton.jit
def replay_chunk(b_h, b_p, b_k, b_v, b_b, p_g, DOT: tl.constexpr, USE_BETA_SIGMOID: tl.constexpr):
    """The forward step without its output: residuals and steps `[BT, BV]`, and the state at the chunk's end `[BV, BK]`."""
    BT: tl.constexpr = b_v.shape[0]
    if USE_BETA_SIGMOID:
        b_b = sigmoid(b_b)
    # [BT]
    b_n = tl.load(p_g + BT * BT + tl.arange(0, BT))
    # [BT, BV]
    b_e = tl.broadcast_to(ratio(b_b, 1.0 + b_b * b_n[:, None]), b_v.shape)
    b_r = forward_substitution(b_v - tl.trans(b_p), b_e, p_g, BT)
    b_u = b_r * b_e
    return b_r, b_u, split_product_t(b_u, b_k, b_h, DOT)


@triton.jit
def output_before_gate(b_h, b_q, b_u, p_a, scale, DOT: tl.constexpr):
    """`scale * (Q S + A U)` for `[BT, BV]` residual steps U and the rounded state `[BV, BK]`."""
    BT: tl.constexpr = b_u.shape[0]
    o_t = tl.arange(0, BT)
    b_a = tl.load(p_a + o_t[:, None] * BT + o_t[None, :])
    b_o = product(b_h, tl.trans(b_q), tl.zeros([b_h.shape[0], BT], dtype=tl.float32), DOT)
    return scale * tl.trans(product(tl.trans(b_u), b_a, b_o, DOT))


@triton.heuristics({
    'HAS_D': lambda args: args['D'] is not None,
    'HAS_Z': lambda args: args['z'] is not None,
    'HAS_SCALE': lambda args: args['scale'] != 1.0,
    'USE_INITIAL_STATE': lambda args: args['dh0'] is not None,
    'USE_FINAL_STATE_GRADIENT': lambda args: args['dht'] is not None,
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'A_PARTS': lambda args: 1 if args['DOT'] == 'ieee' else 2,
})
@triton.jit(do_not_specialize=['T', 'ROWS', 'TOTAL_ROWS', 'TOKENS', 'SLOTS'])
def chunk_longhorn_exact_bwd_kernel(
    do,
    dht,
    q,
    k,
    v,
    beta,
    D,
    z,
    g,
    a,
    states,
    hs,
    rs,
    us,
    dv,
    dbeta,
    dh0,
    dD,
    dz,
    dqk,
    dam,
    cu_seqlens,
    scale,
    T,
    ROWS,
    TOTAL_ROWS,
    TOKENS,
    SLOTS,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    INTERVAL: tl.constexpr,
    DOT: tl.constexpr,
    A_PARTS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    USE_FINAL_STATE_GRADIENT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    r"""One block of channels of one sequence, backwards: each interval is replayed from its saved state, then undone.

    With the letters of the forward kernel and `dS` the gradient of the state at the chunk's end:

    .. math::
        X = A^\top dY + K\,dS - \mathrm{tril}_{<}(G)^\top W, \quad W = E \odot X, \quad
        dV = W, \quad d\epsilon = X \odot R, \quad dS \leftarrow dS + Q^\top dY - K^\top W

    What sums over channels is a product too, of this block's part:
    :math:`dQ = dY S^\top + dA\,K` and :math:`dK = dA^\top Q + U dS^\top - W S^\top - (M + M^\top) K` with
    :math:`dA = \mathrm{tril}(dY U^\top)` and :math:`M = \mathrm{tril}(W U^\top)`, whose diagonal
    :math:`\sum_v d\epsilon\,\epsilon^2` is the gradient through :math:`|k|^2`. `dqk` and `dam` take the parts.
    `hs`, `rs` and `us` hold the states, residuals and steps of the interval at hand.
    """
    i_v, i_h, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    NV = tl.num_programs(0)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    # what a thread may load at once decides which columns it owns
    o_c = tl.multiple_of(tl.arange(0, BV), VEC)
    o_v = tl.multiple_of(i_v * BV + tl.arange(0, BV), VEC)
    m_h = (o_v < V)[:, None] & (o_k < K)[None, :]
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    # int64, so that a row's offset is a constant of the load
    o_x = o_t[:, None].to(tl.int64) * (H * V) + o_v[None, :]
    o_b = o_t[:, None] * H if SCALAR_BETA else o_x
    o_r = o_t[:, None].to(tl.int64) * BV + o_c[None, :]
    o_h = tl.arange(0, BV)[:, None] * BK + o_k[None, :]
    o_a = o_t[:, None] * BT + o_t[None, :]

    i_row = bos * H + i_h
    i_g = first_slot(bos, i_n, T, BT, IS_VARLEN) * H + i_h
    # scratch rows: an interval a sequence, or its own length where that is less
    i_r = tl.minimum(i_n.to(tl.int64) * ROWS, first_slot(bos, i_n, T, BT, IS_VARLEN) * BT)
    i_r += (i_h * NV + i_v).to(tl.int64) * TOTAL_ROWS
    p_rs, p_us, p_hs = rs + i_r * BV, us + i_r * BV, hs + i_r // BT * (BV * BK)
    p_s = states + (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) * H + i_h) * (K * V)
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V) + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)

    # [BV, BK]
    b_dh = tl.load(dht + o_state, mask=m_h, other=0.0) if USE_FINAL_STATE_GRADIENT else tl.zeros([BV, BK], dtype=tl.float32)
    if HAS_D:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
        b_dD = tl.zeros([BV], dtype=tl.float32)

    NS = tl.cdiv(T_n, INTERVAL)
    for j_s in range(NS):
        # int64, as everything that counts tokens from here on
        i_s = (NS - 1).to(tl.int64) - j_s
        first = i_s * (INTERVAL // BT)
        # full chunks of the interval, and whether a partial one follows
        NF = tl.minimum(INTERVAL // BT, (T_n - i_s * INTERVAL) // BT).to(tl.int32)
        NP = tl.where(T_n - i_s * INTERVAL > NF * BT, tl.where(NF < INTERVAL // BT, 1, 0), 0)
        b_h = tl.load(p_s + i_s * (H * K * V) + state_offsets(o_k, o_v, K, V, False), mask=m_h, other=0.0)
        # all threads are done with the scratch of the interval after this one
        tl.debug_barrier()
        for partial in tl.static_range(2):
            for i in tl.range(NP if partial else NF, num_stages=1):
                j_t = NF if partial else i
                i_t = first + j_t
                left = T_n - i_t * BT
                i_x = i_row + i_t * (BT * H)
                # [BT, BK]
                b_k = tl.load(k + i_x * K + o_qk, mask=tile_mask(o_t, o_k, left, K, BK, partial), other=0.0)
                tl.store(p_hs + j_t * (BV * BK) + o_h, rounded(b_h, hs.dtype.element_ty))
                b_p = split_product(b_h, tl.trans(b_k), tl.zeros([BV, BT], dtype=tl.float32), DOT)
                # [BT, BV]; loads placed after the products keep the layout in which a thread owns columns
                m_v = tile_mask(o_t, o_v, left, V, BV, partial)
                b_v = tl.load(v + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
                b_b = load_rows(beta, i_x, V, o_b, o_t, left, m_v, SCALAR_BETA)
                p_g = g + (i_g + i_t * H) * ((BT + 1) * BT)
                b_r, b_u, b_h = replay_chunk(b_h, b_p, b_k, b_v, b_b, p_g, DOT, USE_BETA_SIGMOID)
                tl.store(p_rs + j_t * (BT * BV) + o_r, b_r)
                tl.store(p_us + j_t * (BT * BV) + o_r, operand(b_u, DOT))
        tl.debug_barrier()

        for full in tl.static_range(2):
            # [BT, BV], loaded a chunk ahead
            i_t = first + (NF - full)
            m_v = tile_mask(o_t, o_v, T_n - i_t * BT, V, BV, not full)
            b_do_next = tl.load(do + (i_row + i_t * (BT * H)) * V + o_x, mask=m_v, other=0.0)
            for i in tl.range(NF if full else NP, num_stages=1):
                j_t = NF - full - i
                i_t = first + j_t
                left = T_n - i_t * BT
                i_x = i_row + i_t * (BT * H)
                i_c = i_g + i_t * H
                p_g, p_a = g + i_c * ((BT + 1) * BT), a + i_c * (A_PARTS * BT * BT)
                # [BT, BK]
                m_k = tile_mask(o_t, o_k, left, K, BK, not full)
                b_q = tl.load(q + i_x * K + o_qk, mask=m_k, other=0.0)
                b_k = tl.load(k + i_x * K + o_qk, mask=m_k, other=0.0)
                # [BV, BK], [BT, BV]
                b_h0 = tl.load(p_hs + j_t * (BV * BK) + o_h)
                b_u = tl.load(p_us + j_t * (BT * BV) + o_r)
                m_v = tile_mask(o_t, o_v, left, V, BV, not full)
                b_do = b_do_next.to(tl.float32)
                b_dy = b_do
                if HAS_Z:
                    b_z = tl.load(z + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
                    b_sig = sigmoid(b_z)
                    b_dy *= b_z * b_sig
                    b_y = output_before_gate(b_h0, b_q, b_u, p_a, scale, DOT)
                if HAS_D or HAS_Z:
                    b_v = tl.load(v + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
                if HAS_D:
                    b_dD += tl.sum(b_dy * b_v, 0)
                    b_skip = b_D[None, :] * b_dy
                if HAS_Z:
                    if HAS_D:
                        b_y += b_D[None, :] * b_v
                    b_dz = b_do * b_y * (b_sig * (1.0 + b_z * (1.0 - b_sig)))
                    tl.store(dz + i_x * V + o_x, rounded(b_dz, dz.dtype.element_ty), mask=m_v)
                if HAS_SCALE:
                    b_dy *= scale
                b_dy = operand(b_dy, DOT)

                # what needs no W comes first, so that little is alive during the substitution
                # X^T [BV, BT]; `a` is transposed, and once more for this product
                b_x = split_product(b_dh, tl.trans(b_k), tl.zeros([BV, BT], dtype=tl.float32), DOT)
                for part in tl.static_range(A_PARTS):
                    b_a = tl.load(p_a + part * (BT * BT) + o_a)
                    b_x = product(tl.trans(b_dy), tl.trans(b_a), b_x, DOT)
                # this block's part of what sums over the channels: [BT, BK] and [BT, BT]
                b_zero = tl.zeros([BT, BK], dtype=tl.float32)
                p_dqk = dqk + (i_v.to(tl.int64) * 2 * TOKENS * H + i_x) * K
                p_dam = dam + (i_v.to(tl.int64) * SLOTS * H + i_c) * (2 * BT * BT)
                b_dk = product(b_u, operand(b_dh, DOT), b_zero, DOT)
                tl.store(p_dqk + o_qk, product(b_dy, b_h0, b_zero, DOT), mask=m_k)
                b_zero = tl.zeros([BT, BT], dtype=tl.float32)
                tl.store(p_dam + o_a, product(b_dy, tl.trans(b_u), b_zero, DOT))
                b_dh = product(tl.trans(b_dy), b_q, b_dh, DOT)

                # [BT, BV]
                b_b = load_rows(beta, i_x, V, o_b, o_t, left, m_v, SCALAR_BETA)
                if USE_BETA_SIGMOID:
                    b_b = sigmoid(b_b)
                # [BT]
                b_n = tl.load(p_g + BT * BT + o_t)
                # [BT, BV]
                b_f = tl.broadcast_to(ratio(1.0, 1.0 + b_b * b_n[:, None]), (BT, BV))
                b_e = b_f * b_b
                # the sum with a loaded tile gives X that layout
                if SCALAR_BETA:
                    b_r = tl.load(p_rs + j_t * (BT * BV) + o_r)
                    b_x = tl.trans(b_x) + 0.0 * b_r
                else:
                    b_x = tl.trans(b_x) + 0.0 * b_b
                b_x = reverse_substitution(b_x, b_e, p_g, BT)
                b_w = b_x * b_e
                if not SCALAR_BETA:
                    b_r = tl.load(p_rs + j_t * (BT * BV) + o_r)
                before = tl.where(i + 1 < (NF if full else NP), 1, 0)
                m_before = tile_mask(o_t, o_v, before, V, BV, False)
                b_do_next = tl.load(do + (i_x - BT * H) * V + o_x, mask=m_before, other=0.0)

                b_dv = b_w + b_skip if HAS_D else b_w
                tl.store(dv + i_x * V + o_x, rounded(b_dv, dv.dtype.element_ty), mask=m_v)
                if not SCALAR_BETA:
                    b_db = b_x * b_r * b_f * b_f
                    if USE_BETA_SIGMOID:
                        b_db *= b_b * (1.0 - b_b)
                    tl.store(dbeta + i_x * V + o_x, rounded(b_db, dbeta.dtype.element_ty), mask=m_v)

                # loaded again rather than kept
                b_h0 = tl.load(p_hs + j_t * (BV * BK) + o_h)
                b_u = tl.load(p_us + j_t * (BT * BV) + o_r)
                b_wo = operand(b_w, DOT)
                b_dk -= product(b_wo, b_h0, tl.zeros([BT, BK], dtype=tl.float32), DOT)
                tl.store(p_dqk + TOKENS.to(tl.int64) * H * K + o_qk, b_dk, mask=m_k)
                if SCALAR_BETA:
                    b_m = product(operand(b_x, DOT), tl.trans(operand(b_r, DOT)), b_zero, DOT)
                else:
                    b_m = product(b_wo, tl.trans(b_u), b_zero, DOT)
                tl.store(p_dam + BT * BT + o_a, b_m)
                b_dh = split_product_t(b_w, operand(-b_k.to(tl.float32), DOT), b_dh, DOT)

    if HAS_D:
        tl.store(dD + (i_n.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=o_v < V)
    if USE_INITIAL_STATE:
        tl.store(dh0 + o_state, b_dh, mask=m_h)


def chunk_longhorn_exact_bwd(
    do: torch.Tensor,
    dht: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    states: torch.Tensor,
    use_beta_sigmoid: bool,
    state_v_first: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, beta, the initial state, D and z (`None` for an absent one); arguments contiguous."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    interval, precision, tile = checkpoint_interval(K), operand_precision(q, k, v), backward_tile(K)
    slots = chunk_slots(B, T, N, cu_seqlens is not None)
    NV, BV, BK = triton.cdiv(V, tile['BV']), tile['BV'], tile['BK']
    g, a = chunk_longhorn_exact_gram(q, k, cu_seqlens, precision)

    dv, dbeta = torch.empty_like(v), torch.empty_like(beta)
    dh0, dz = (None if x is None else torch.empty_like(x) for x in (initial_state, z))
    dD = None if D is None else q.new_empty((N, H, V), dtype=torch.float32)
    dqk = q.new_empty((NV, 2, B, T, H, K), dtype=torch.float32)
    dam = q.new_empty((NV, slots, H, 2, CHUNK_SIZE, CHUNK_SIZE), dtype=torch.float32)
    rows = min(interval, triton.cdiv(T, CHUNK_SIZE) * CHUNK_SIZE)
    total_rows = min(N * rows, slots * CHUNK_SIZE)
    operand_dtype = torch.bfloat16 if precision == 'bf16' else torch.float32
    rs = q.new_empty((H, NV, total_rows, BV), dtype=torch.float32)
    us = q.new_empty((H, NV, total_rows, BV), dtype=operand_dtype)
    hs = q.new_empty((H, NV, total_rows // CHUNK_SIZE, BV, BK), dtype=operand_dtype)

    chunk_longhorn_exact_bwd_kernel[(NV, H, N)](
        do, dht, q, k, v, beta, D, z, g, a, states, hs, rs, us, dv, dbeta, dh0, dD, dz, dqk, dam, cu_seqlens, scale, T, rows,
        total_rows, B * T, slots, H=H, K=K, V=V, BT=CHUNK_SIZE, INTERVAL=interval, DOT=precision,
        USE_BETA_SIGMOID=use_beta_sigmoid, SCALAR_BETA=beta.dim() == 3, STATE_V_FIRST=state_v_first, **tile,
    )
    dq, dk = chunk_longhorn_exact_bwd_qk(q, k, beta, dqk, dam, dbeta, cu_seqlens, use_beta_sigmoid)
    return dq, dk, dv, dbeta, dh0, None if D is None else dD.sum(0).to(D.dtype), dz
