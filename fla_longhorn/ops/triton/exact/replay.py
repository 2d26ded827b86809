"""Exact update, the first kernel of backward: recompute the forward of all intervals at once from their saved states."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import decays, sigmoid, step_factors
from fla_longhorn.ops.triton.exact.common import (
    add_reads,
    add_updates,
    chunk_offsets,
    gram_rows,
    head_index_and_channels,
    interval_of,
    load_keys,
    load_tile,
    padded,
    products_after,
    reads,
    rounded,
    store_tile,
    substitution,
)
from fla_longhorn.ops.triton.exact.gram import gram_pointers
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, locate_slot, num_slots


@triton.jit
def skip_and_silu_gradients(b_do, b_o, b_D, b_v, b_z):
    """dY, which is dO times silu(Z), and the gradient of Z; D may be None."""
    b_sig = sigmoid(b_z)
    b_silu = b_z * b_sig
    if b_D is not None:
        b_o += b_D[None, :] * b_v
    return b_do * b_silu, b_do * b_o * (b_sig + b_silu * (1.0 - b_sig))


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_replay(
    q,
    k,
    v,
    beta,
    D,
    z,
    g,
    do,
    gram,
    a,
    states,
    us,
    cs,
    hs,
    ps,
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
    S: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
):
    r"""Recompute one block of channels of one interval, and store what the other kernels of backward need.

    In the notation of the forward kernel, these are U in `us`, R times the slopes of the step sizes in `cs`, which is the
    factor of X in dbeta, and the states at the starts of the spans in `hs`. For a scalar step, `us` holds R. There is no `cs`
    for a scalar step, nor without `stores_cs`. With z or D, the kernel also stores `dz`, `dy` (the gradient of what z
    multiplies) and this interval's part of `dD`. With g, `hs` has the final states behind those of the spans; with one per
    channel, O times its gradient is stored in `ps`, in float32.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    INTERVAL: tl.constexpr = interval_of(K)
    PER_CHANNEL: tl.constexpr = g is not None and not SCALAR_G
    # states are those of the updates as they are stored
    ROUNDED: tl.constexpr = DOT == 'bf16' and not (SCALAR_BETA or PER_CHANNEL)
    i_h, i_c, i_v = head_index_and_channels(H, V, BV)
    i_n, bos, T_n, bos_i = locate_slot(cu_seqlens, i_c, T, N, INTERVAL, IS_VARLEN)
    # tokens of this interval, none in an unused slot
    T_i = tl.maximum(tl.minimum(T_n - bos_i, INTERVAL), 0).to(tl.int32)
    i_gram = (first_slot(bos, i_n, T, BT, IS_VARLEN) + bos_i // BT) * H + i_h
    p_hs = hs + ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + bos_i // SPAN) * H + i_h) * (PARTS * K * V)

    o_t, o_k, o_v, o_1 = chunk_offsets(i_v, BT, padded(K), BV, VEC)
    q, k, v, us = q + i_h * K, k + i_h * K, v + i_h * V, us + i_h * V
    do, dy = do + i_h * V, dy + i_h * V
    if SCALAR_BETA:
        beta, o_beta = beta + i_h, o_1
    else:
        beta, o_beta = beta + i_h * V, o_v
    if z is not None:
        z, dz = z + i_h * V, dz + i_h * V
    if cs is not None:
        cs += i_h * V
    if SCALAR_G:
        g, o_g = g + i_h, o_1
    elif PER_CHANNEL:
        g, ps, o_g = g + i_h * V, ps + i_h * V, o_v
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
        b_dD = tl.zeros([BV], dtype=tl.float32)
    b_h = load_state(states + (i_c.to(tl.int64) * H + i_h) * (K * V), o_k, o_v, T_i > 0, K, V, True)
    for i_s in range(0, T_i, SPAN):
        store_state(p_hs, b_h, o_k, o_v, None, K, V, True, PARTS)
        p_hs += H * PARTS * K * V
        for i_t in tl.range(i_s, tl.minimum(i_s + SPAN, T_i), BT, num_stages=1):
            i_x, left = bos + bos_i + i_t, T_i - i_t
            p_gram, p_a = gram_pointers(gram, a, i_gram, BT)
            # [BT]
            b_n = tl.load(p_gram + BT * BT + o_t)
            # [BV, BT]; dbeta is a small difference of V and K S, and dg one of sums
            b_k = load_keys(k, S.k, i_x, o_t, o_k, left, K)
            b_p = reads(b_h, b_k, DOT, True)
            if z is not None or PER_CHANNEL:
                b_q = load_keys(q, S.q, i_x, o_t, o_k, left, K)
                b_o = reads(b_h, b_q, DOT, PER_CHANNEL)
                if scale is not None:
                    # `a` was multiplied by the scale already
                    b_o *= scale
            rows = gram_rows(p_gram, BT)
            # [BT, BV]; loaded after the products, they keep the layout in which a thread owns columns
            b_v = load_tile(v, S.v, i_x, o_t, o_v, left, V).to(tl.float32)
            b_beta = load_tile(beta, S.beta, i_x, o_t, o_beta, left, V).to(tl.float32)
            b_f, b_rest, b_slope = step_factors(b_beta, b_n[:, None], OPTIONS)
            b_e = tl.broadcast_to(b_f * b_rest, b_v.shape)
            b_d = None
            if g is not None:
                b_d = tl.broadcast_to(decays(load_tile(g, S.g, i_x, o_t, o_g, left, V)), b_v.shape)
            b_r = substitution(tl.trans(b_p), b_v, b_e, b_d, rows, 'bf16' if ROUNDED else 'ieee')
            b_u = b_r * b_e
            store_tile(us, H * V, i_x, o_t, o_v, left, V, b_r if SCALAR_BETA else b_u)
            if cs is not None:
                store_tile(cs, H * V, i_x, o_t, o_v, left, V, b_r * b_f * b_slope)
            if ROUNDED:
                b_u = rounded(b_u, tl.bfloat16).to(tl.float32)
            # again, because what was loaded before takes registers until here
            b_k = load_keys(k, S.k, i_x, o_t, o_k, left, K)
            if z is not None or PER_CHANNEL:
                b_o = add_reads(b_o, b_u, b_d, p_a, DOT)
            if b_d is not None:
                b_after, b_total = products_after(b_d)
                b_h, b_u = b_h * b_total[:, None], b_u * b_after
            b_h = add_updates(b_h, b_u, b_k, DOT)
            if D is not None or z is not None or PER_CHANNEL:
                b_do = load_tile(do, S.do, i_x, o_t, o_v, left, V).to(tl.float32)
                if z is not None:
                    b_z = load_tile(z, S.z, i_x, o_t, o_v, left, V).to(tl.float32)
                    b_do, b_dz = skip_and_silu_gradients(b_do, b_o, b_D, b_v, b_z)
                    store_tile(dz, H * V, i_x, o_t, o_v, left, V, b_dz)
                if D is not None:
                    b_dD += tl.sum(b_do * b_v, 0)
                if z is not None:
                    # as the other kernels see it, whose sums this one's are subtracted from
                    b_do = rounded(b_do, dy.dtype.element_ty)
                    store_tile(dy, H * V, i_x, o_t, o_v, left, V, b_do)
                if PER_CHANNEL:
                    store_tile(ps, H * V, i_x, o_t, o_v, left, V, b_do.to(tl.float32) * b_o)
            i_gram += H
    if g is not None:
        i_end = num_slots(T, N, SPAN, IS_VARLEN) + i_n
        is_last = (T_i > 0) & (bos_i + INTERVAL >= T_n)
        store_state(hs + (i_end * H + i_h) * (PARTS * K * V), b_h, o_k, o_v, is_last, K, V, True, PARTS)
    if D is not None:
        tl.store(dD + (i_c.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=o_v < V)
