"""Exact update, the first kernel of backward: recompute the forward of all intervals at once from their saved states."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import given, sigmoid, step_factors
from fla_longhorn.ops.triton.exact.common import (
    chunk_decays,
    chunk_offsets,
    decayed,
    decayed_reads,
    decayed_substitution,
    forward_substitution,
    gram_pointers,
    head_index_and_channels,
    load_tile,
    operand,
    product,
    products_after,
    rounded,
    split_product,
    tile_mask,
    tile_offsets,
)
from fla_longhorn.ops.triton.exact.state import add_updates, load_slice, load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, locate_slot


@triton.jit
def replay_chunk(
    b_h, b_dD, b_D, inputs, outputs, strides, offsets, i_x, i_gram, left, scale, K: tl.constexpr, V: tl.constexpr,
    DOT: tl.constexpr, OPTIONS: tl.constexpr, PARTIAL: tl.constexpr,
):
    """One chunk of the forward: store what the other kernels need, return the state's slices and the sum of dD."""
    q, k, v, beta, z, g, do, gram, a = inputs
    us, cs, ps, dy, dz = outputs
    S_Q, S_K, S_V, S_B, S_Z, S_G, S_DO, S_X = strides
    o_t, o_k, o_v, o_b, o_g, x_q, x_k, x_v, x_b, x_z, x_g, x_do, x_x = offsets
    SCALAR_BETA: tl.constexpr = o_b.shape[0] == 1
    # bfloat16 needs it only for a scalar step, whose sums over channels use R, and with a gate, whose decayed U are rounded
    # again; the others round U in the same way. In tf32, a single product would make several warps convert the state's layout
    GATED: tl.constexpr = g is not None
    SPLIT: tl.constexpr = DOT == 'tf32' or ((SCALAR_BETA or GATED) and DOT == 'bf16')
    BT: tl.constexpr = o_t.shape[0]
    SLICES: tl.constexpr = len(b_h)
    BV: tl.constexpr = o_v.shape[0]
    m_v = tile_mask(o_t, o_v, left, V, BV, PARTIAL)
    p_k = k + i_x * S_K + x_k
    p_gram, p_a = gram_pointers(gram, a, i_gram, BT, DOT, GATED)
    b_p, b_o, b_k = tl.zeros([BV, BT], dtype=tl.float32), tl.zeros([BV, BT], dtype=tl.float32), ()
    for s in tl.static_range(SLICES):
        b_s = load_slice(p_k, o_t, o_k, s, left, K, PARTIAL)
        b_p = split_product(b_h[s], tl.trans(b_s), b_p, DOT)
        b_k = b_k + (b_s,)
    # [BT, BV]; loaded after the products, they keep the layout in which a thread owns columns
    b_v = load_tile(v + i_x * S_V + x_v, o_t, o_v, left, V, PARTIAL).to(tl.float32)
    b_b = load_tile(beta + i_x * S_B + x_b, o_t, o_b, left, V, PARTIAL).to(tl.float32)
    # [BT]
    b_n = tl.load(p_gram + BT * BT + o_t)
    b_f, b_rest, b_slope = step_factors(b_b, b_n[:, None], OPTIONS)
    # [BT, BV]
    b_e = tl.broadcast_to(b_f * b_rest, b_v.shape)
    if GATED:
        b_g = None if o_g.shape[0] == 1 else load_tile(g + i_x * S_G + x_g, o_t, o_g, left, V, PARTIAL)
        b_d = chunk_decays(b_g, g + i_x * S_G, o_t, left, S_G, BV)
        b_r = decayed_substitution(tl.trans(b_p), b_v, b_e, b_d, p_gram, BT)
    else:
        b_r = forward_substitution(b_v - tl.trans(b_p), b_e, (), p_gram, BT, DOT, not SPLIT, 0)
    b_u = b_r * b_e
    if SCALAR_BETA:
        tl.store(us + i_x * S_X + x_x, operand(b_r, DOT), mask=m_v)
    else:
        tl.store(us + i_x * S_X + x_x, operand(b_u, DOT), mask=m_v)
        if cs is not None:
            tl.store(cs + i_x * S_X + x_x, rounded(b_r * b_f * b_slope, cs.dtype.element_ty), mask=m_v)
    if z is not None or GATED:
        # (Q S)^T after the substitution, which needs the registers
        p_q = q + i_x * S_Q + x_q
        for s in tl.static_range(SLICES):
            b_q = load_slice(p_q, o_t, o_k, s, left, K, PARTIAL)
            if GATED:
                # dg is a difference of sums of outputs and of values
                b_o = split_product(b_h[s], tl.trans(b_q), b_o, DOT)
            else:
                b_o = product(b_h[s], tl.trans(b_q), b_o, DOT)
        if scale is not None:
            b_o *= scale
    if GATED:
        # `a` was multiplied by the scale already
        b_o = tl.trans(decayed_reads(tl.trans(b_o), b_u, b_d, p_a, BT))
        b_after, b_total = products_after(b_d)
        b_h, b_u = decayed(b_h, b_total), b_u * b_after
    # reload k if there are not enough registers to hold it
    b_h, b_o = add_updates(
        b_h, b_o, b_u, None if SLICES > 1 else b_k, p_k, o_t, o_k, left, p_a, K, DOT, SPLIT, z is not None and not GATED,
        PARTIAL,
    )
    if b_D is not None or z is not None or GATED:
        p_v, p_do = v + i_x * S_V + x_v, do + i_x * S_DO + x_do
        p_z = None if z is None else z + i_x * S_Z + x_z
        p_dy, p_dz = dy + i_x * S_X + x_x, None if z is None else dz + i_x * S_X + x_x
        p_p = ps + i_x * S_X + x_x if GATED else None
        b_dD = gate_gradients(b_o, b_D, b_dD, p_v, p_z, p_do, p_dy, p_dz, p_p, m_v)
    return b_h, b_dD


@triton.jit
def gate_gradients(b_o, b_D, b_dD, p_v, p_z, p_do, p_dy, p_dz, p_p, m_v):
    """Given `(scale O)^T`, store the gradients of the gate z and of what it multiplies; return the sum of dD.

    b_D or p_z may be None. At p_p, if given, O times its gradient is stored. v is reloaded, because there are not enough
    registers to hold it.
    """
    # [BT, BV]
    b_do = tl.load(p_do, mask=m_v, other=0.0).to(tl.float32)
    if b_D is not None:
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    if p_z is not None:
        b_y = tl.trans(b_o)
        if b_D is not None:
            b_y += b_D[None, :] * b_v
        b_z = tl.load(p_z, mask=m_v, other=0.0).to(tl.float32)
        b_sig = sigmoid(b_z)
        # dz = do y (sig + silu (1 - sig))
        b_dz = b_do * b_y
        b_silu = b_z * b_sig
        b_dz *= b_sig + b_silu * (1.0 - b_sig)
        tl.store(p_dz, rounded(b_dz, p_dz.dtype.element_ty), mask=m_v)
        b_do *= b_silu
        b_dy = rounded(b_do, p_dy.dtype.element_ty)
        tl.store(p_dy, b_dy, mask=m_v)
        if p_p is not None:
            # as the other kernels see it, whose sums this one's are subtracted from
            b_do = b_dy.to(tl.float32)
    if p_p is not None:
        tl.store(p_p, b_do * tl.trans(b_o), mask=m_v)
    if b_D is not None:
        b_dD += tl.sum(b_do * b_v, 0)
    return b_dD


@triton.heuristics({
    'HAS_SCALE': lambda args: args['scale'] != 1.0, **given(HAS_D='D', HAS_Z='z', HAS_G='g', IS_VARLEN='cu_seqlens'),
})
@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_replay(
    q, k, v, beta, D, z, g, do, gram, a, states, us, cs, hs, ps, dD, dy, dz, cu_seqlens, scale, T, N,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S_Q: tl.constexpr, S_K: tl.constexpr, S_V: tl.constexpr,
    S_B: tl.constexpr, S_Z: tl.constexpr, S_G: tl.constexpr, S_DO: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BS: tl.constexpr, BV: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr, INTERVAL: tl.constexpr, SPAN: tl.constexpr,
    PARTS: tl.constexpr, DOT: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr, HAS_SCALE: tl.constexpr, IS_VARLEN: tl.constexpr,
):
    r"""Recompute one block of channels of one interval, and store what the other kernels of backward need.

    In the notation of the forward kernel, these are U in `us`, R times the slopes of the step sizes in `cs`, which is the
    factor of X in dbeta, and the states at the starts of the spans in `hs`. For a scalar step, `us` holds R. There is no `cs`
    for a scalar step, nor without `stores_cs`. With z or D, the kernel also stores `dz`, `dy` (the gradient of what z
    multiplies) and this interval's part of `dD`. With g, it stores O times its gradient in `ps`, in float32.
    """
    i_h, i_c, i_v = head_index_and_channels(H, V, BV)
    i_n, bos, T_n, bos_i = locate_slot(cu_seqlens, i_c, T, N, INTERVAL, IS_VARLEN)
    # tokens of this interval, none in an unused slot
    T_i = tl.maximum(tl.minimum(T_n - bos_i, INTERVAL), 0).to(tl.int32)
    NT = T_i // BT

    offsets = chunk_offsets(i_v, BT, BS, BV, VEC, SCALAR_BETA, SCALAR_G)
    o_t, o_k, o_v, o_b, o_g = offsets
    SLICES: tl.constexpr = BK // BS

    i_x = bos + bos_i
    i_gram = (first_slot(bos, i_n, T, BT, IS_VARLEN) + bos_i // BT) * H + i_h
    p_hs = hs + ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + bos_i // SPAN) * H + i_h) * (PARTS * K * V)
    p_s = states + (i_c.to(tl.int64) * H + i_h) * (K * V)
    b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32) if HAS_D else None
    b_dD = tl.zeros([BV], dtype=tl.float32)
    q, k, v, us = q + i_h * K, k + i_h * K, v + i_h * V, us + i_h * V
    do, dy, beta = do + i_h * V, dy + i_h * V, beta + (i_h if SCALAR_BETA else i_h * V)
    if HAS_Z:
        z, dz = z + i_h * V, dz + i_h * V
    if cs is not None:
        cs += i_h * V
    if HAS_G:
        g, ps = g + (i_h if SCALAR_G else i_h * V), ps + i_h * V
    inputs, outputs = (q, k, v, beta, z, g, do, gram, a), (us, cs, ps, dy, dz)
    strides = (S_Q, S_K, S_V, S_B, S_Z, S_G, S_DO, H * V)
    x_q, x_k, x_v = tile_offsets(S_Q, o_t, o_k), tile_offsets(S_K, o_t, o_k), tile_offsets(S_V, o_t, o_v)
    x_b, x_z, x_do = tile_offsets(S_B, o_t, o_b), tile_offsets(S_Z, o_t, o_v), tile_offsets(S_DO, o_t, o_v)
    x_x, x_g = tile_offsets(H * V, o_t, o_v), tile_offsets(S_G, o_t, o_g)
    offsets = (o_t, o_k, o_v, o_b, o_g, x_q, x_k, x_v, x_b, x_z, x_g, x_do, x_x)
    factor = scale if HAS_SCALE else None
    b_h = load_state(p_s, o_k, o_v, T_i > 0, K, V, SLICES, True)
    for i_s in range(tl.cdiv(NT, SPAN // BT)):
        store_state(p_hs, b_h, o_k, o_v, None, K, V, True, PARTS)
        p_hs += H * PARTS * K * V
        for _ in tl.range(i_s * (SPAN // BT), tl.minimum((i_s + 1) * (SPAN // BT), NT), num_stages=STAGES):
            b_h, b_dD = replay_chunk(
                b_h, b_dD, b_D, inputs, outputs, strides, offsets, i_x, i_gram, BT, factor, K, V, DOT, OPTIONS, False,
            )
            i_x += BT
            i_gram += H
    # the tokens after the last full chunk
    left = T_i - NT * BT
    if left > 0:
        if NT % (SPAN // BT) == 0:
            store_state(p_hs, b_h, o_k, o_v, None, K, V, True, PARTS)
        b_h, b_dD = replay_chunk(
            b_h, b_dD, b_D, inputs, outputs, strides, offsets, i_x, i_gram, left, factor, K, V, DOT, OPTIONS, True,
        )
    if HAS_D:
        tl.store(dD + (i_c.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=o_v < V)
