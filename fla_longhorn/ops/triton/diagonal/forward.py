"""Forward kernels of the diagonal update: one pass over the tokens of a segment, and one token for decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import (
    FUSED,
    SAME_IN_ALL_LANES,
    decays,
    is_scalar,
    launch_key,
    sigmoid,
    step_sizes,
    strided_inputs,
    weighted_rows,
)
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.common import (
    channel_offsets,
    channel_pointers,
    for_forward,
    for_step,
    from_word,
    load_inputs,
    load_rows,
    locate_segment,
    prepare_rows,
    state_offsets,
    unstack,
    update,
)
from fla_longhorn.ops.triton.slots import first_slot, has_spare_slot, locate_states, only_if, row_arguments


@triton.jit
def keys_and_queries(b_rows):
    """Tuples of the keys and of the queries, each `[BK, 1]`, of rows `[2 BK, U]`."""
    BK: tl.constexpr = b_rows.shape[0] // 2
    ks, qs, rows = (), (), unstack(b_rows)
    for u in tl.static_range(len(rows)):
        b_k, b_q = tl.split(tl.permute(tl.reshape(rows[u], (2, BK, 1)), (1, 2, 0)))
        ks, qs = ks + (b_k,), qs + (b_q,)
    return ks, qs


@triton.jit(do_not_specialize=['T', 'N', 'L', 'INTERVAL'])
def longhorn_fwd_kernel(
    kq,
    v,
    beta,
    D,
    z,
    g,
    o,
    h0,
    ht,
    states,
    cu_seqlens,
    T,
    N,
    L,
    INTERVAL,
    state_indices,
    final_state_indices,
    has_initial_state,
    pad_slot_id,
    s_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S_V: tl.constexpr,
    S_Z: tl.constexpr,
    S_G: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    U: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    POOLED: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    """o_t = (q_t^T S_t + D v_t) silu(z_t) along one segment, for BV channels of a head.

    `h0` holds the state at the start of each segment slot; states are saved to `states`. With POOLED, `ht` is a pool whose
    rows are given by the indices, and so is `h0` unless sequences are SEGMENTED.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    STRIDES: tl.constexpr = (S_V, H if SCALAR_BETA else H * V, S_G, S_Z)
    S_KQ: tl.constexpr = H * (2 * BK + 4)
    i_p = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_s = i_p % NV, (i_p // NV) % H, i_p // (NV * H)
    i_n, bos, eos, t, end, used = locate_segment(i_s, cu_seqlens, T, N, L, IS_VARLEN)
    if not used:
        return
    i_r, i_w = i_s.to(tl.int64), i_n.to(tl.int64)
    if POOLED:
        first, i_w, read, written, used = locate_states(
            i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id,
        )
        if not used:
            return

    o_k = tl.arange(0, BK)[:, None]
    o_v = channel_offsets(i_v, BV)
    m_v = o_v < V
    m_h = (o_k < K) & m_v
    # [BK, BV]
    o_h = i_h * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
    m_r, m_w, s_r = m_h, m_h, H * K * V
    if POOLED:
        m_w = only_if(written, m_h)
        if not SEGMENTED:
            i_r, m_r, s_r = first, only_if(read, m_h), s_h
    if h0 is not None:
        b_h = tl.load(h0 + i_r * s_r + o_h, mask=m_r, other=0.)
    else:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    # [1, BV]
    b_D = tl.load(D + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32) if D is not None else 0.
    i_c = (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) + (t - bos) // INTERVAL) * H + i_h

    n_t = (end - t).to(tl.int32)
    p_row = kq + (t * H + i_h) * (2 * BK + 4)
    p_o = o + (t * H + i_h) * V + o_v
    p_v = channel_pointers(v, t, i_h, o_v, S_V, V, False)
    p_beta = channel_pointers(beta, t, i_h, o_v, STRIDES[1], V, SCALAR_BETA)
    p_g = channel_pointers(g, t, i_h, o_v, S_G, V, SCALAR_G) if g is not None else p_v
    p_z = channel_pointers(z, t, i_h, o_v, S_Z, V, False) if z is not None else p_v
    # the compiler moves no load above a store: inputs are prefetched a block ahead, and outputs stored at its end
    xs = load_inputs((p_v, p_beta, p_g, p_z), 0, n_t, m_v, STRIDES, OPTIONS, U)
    b_rows, ns = load_rows(p_row, tl.arange(0, 2 * BK), tl.maximum(n_t, 1), BK, S_KQ, U)
    for i_s in range(0, n_t, INTERVAL):
        if states is not None:
            tl.store(states + i_c * K * V + o_k * V + o_v, b_h, mask=m_h)
            i_c += H
        for i_t in range(i_s, tl.minimum(i_s + INTERVAL, n_t), U):
            p_v, p_beta, p_g, p_z = p_v + U * S_V, p_beta + U * STRIDES[1], p_g + U * S_G, p_z + U * S_Z
            next_xs = load_inputs((p_v, p_beta, p_g, p_z), 0, n_t - i_t - U, m_v, STRIDES, OPTIONS, U)
            p_row += U * S_KQ
            # behind the last token, its row again
            n_next = n_t - i_t - U
            p_next = p_row + tl.minimum(n_next - 1, 0) * S_KQ
            next_rows, next_ns = load_rows(p_next, tl.arange(0, 2 * BK), tl.maximum(n_next, 1), BK, S_KQ, U)
            ks, qs = keys_and_queries(b_rows)
            outputs = ()
            for u in tl.static_range(U):
                b_v = from_word(xs[0][u], v)
                if g is not None:
                    b_h *= decays(from_word(xs[2][u], g))
                b_h = update(b_h, ks[u], step_sizes(from_word(xs[1][u], beta), ns[u], OPTIONS), b_v)
                # chains of FMA as short as at K = 16
                b_o = weighted_rows(qs[u], b_h, min(BK // 8, 4))
                if D is not None:
                    b_o += b_D * b_v
                if z is not None:
                    b_z = from_word(xs[3][u], z)
                    b_o *= b_z * sigmoid(b_z)
                outputs = outputs + (b_o,)
            for u in tl.static_range(U):
                m_t = m_v & (tl.full(m_v.shape, u, tl.int32) < n_t - i_t)
                tl.store(p_o + u * H * V, outputs[u].to(p_o.dtype.element_ty), mask=m_t)
            xs, b_rows, ns = next_xs, next_rows, next_ns
            p_o += U * H * V
    if states is not None and IS_VARLEN:
        m_s = only_if((end == eos) & has_spare_slot(bos, eos, INTERVAL), m_h)
        tl.store(states + i_c * K * V + o_k * V + o_v, tl.zeros([BK, BV], dtype=tl.float32), mask=m_s)
    if ht is not None:
        if end == eos:
            tl.store(ht + i_w * s_h + o_h, b_h, mask=m_w)


def longhorn_diagonal_fwd(
    args: Arguments, ht: torch.Tensor | None, states: torch.Tensor | None, pool: Pool | None, *, parallel: bool,
) -> torch.Tensor:
    """Return `o`; write the final state to `ht` and the states for backward to `states`, where given."""
    args, strides = strided_inputs(args, ('v', 'z', 'g'))
    B, T, H, K, V = args.sizes
    N, v, cu_seqlens = args.num_sequences, args.v, args.cu_seqlens
    kernel, config = longhorn_fwd_kernel, for_forward(launch_key(args))
    kq, L = prepare_rows(args), segments.segment_length(args, parallel, config.BV)
    h0 = args.initial_state if pool is None else pool.states
    if L <= T:
        decay, local = segments.summarize_segments(kq, args, L=L)
        h0 = segments.combine_segments(decay, local, h0, args, L=L, reverse=False, pool=pool)
    # programs of a sequence without a row return at once
    o = (torch.empty if pool is None else torch.zeros)(B, T, H, V, dtype=v.dtype, device=v.device)
    kernel[(num_checkpoints(B, T, N, L, cu_seqlens is not None) * H * triton.cdiv(V, config.BV),)](
        kq=kq,
        v=v,
        beta=args.beta,
        D=args.D,
        z=args.z,
        g=args.g,
        o=o,
        h0=h0,
        ht=ht,
        states=states,
        cu_seqlens=cu_seqlens,
        T=T,
        N=N,
        L=L,
        INTERVAL=checkpoint_interval(K),
        H=H,
        K=K,
        V=V,
        OPTIONS=args.step_options,
        SCALAR_BETA=is_scalar(args.beta),
        SCALAR_G=is_scalar(args.g),
        STATE_V_FIRST=args.state_v_first,
        SEGMENTED=L <= T,
        **strides,
        **config.of(kernel),
        **row_arguments(pool, H * K * V),
        **FUSED,
    )
    return o


@triton.jit
def longhorn_step_kernel(
    q,
    k,
    v,
    beta,
    D,
    z,
    g,
    o,
    h0,
    ht,
    scale,
    s_qb,
    s_qh,
    s_qk,
    s_kb,
    s_kh,
    s_kk,
    s_vb,
    s_zb,
    s_gb,
    state_indices,
    final_state_indices,
    has_initial_state,
    pad_slot_id,
    s_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    POOLED: tl.constexpr,
):
    """One token of every sequence in one launch; reads q and k themselves, not prepared rows.

    With POOLED, `h0` and `ht` are a pool whose rows are given by the indices; else row b is sequence b's.
    """
    i_p = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_b = i_p % NV, (i_p // NV) % H, (i_p // (NV * H)).to(tl.int64)
    o_k, o_v = tl.arange(0, BK)[:, None], (i_v * BV + tl.arange(0, BV))[None, :]
    m_k, m_v = o_k < K, o_v < V
    # [BK, 1]
    b_q = tl.load(q + i_b * s_qb + i_h * s_qh + o_k * s_qk, mask=m_k, other=0.).to(tl.float32) * scale
    b_k = tl.load(k + i_b * s_kb + i_h * s_kh + o_k * s_kk, mask=m_k, other=0.).to(tl.float32)
    # [1, BV]
    b_v = tl.load(v + i_b * s_vb + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32)
    if SCALAR_BETA:
        b_beta = tl.load(beta + i_b * H + i_h).to(tl.float32) + tl.zeros_like(b_v)
    else:
        b_beta = tl.load(beta + (i_b * H + i_h) * V + o_v, mask=m_v, other=0.).to(tl.float32)
    # [BK, BV]
    o_h, m_r, m_w = i_h * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST), m_k & m_v, m_k & m_v
    i_r, i_w = i_b, i_b
    if POOLED:
        i_r, i_w, read, written, used = locate_states(i_b, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        m_r, m_w = only_if(read, m_r), only_if(written, m_w)
    if h0 is not None:
        b_h = tl.load(h0 + i_r * s_h + o_h, mask=m_r, other=0.)
    else:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    if g is not None:
        if SCALAR_G:
            b_g = tl.load(g + i_b * s_gb + i_h)
        else:
            b_g = tl.load(g + i_b * s_gb + i_h * V + o_v, mask=m_v, other=0.)
        b_h *= decays(b_g)
    b_h = update(b_h, b_k, step_sizes(b_beta, tl.sum(b_k * b_k), OPTIONS), b_v)
    if ht is not None:
        tl.store(ht + i_w * s_h + o_h, b_h, mask=m_w)
    b_o = tl.sum(b_q * b_h, 0)[None, :]
    if D is not None:
        b_o += tl.load(D + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32) * b_v
    if z is not None:
        b_z = tl.load(z + i_b * s_zb + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32)
        b_o *= b_z * sigmoid(b_z)
    if POOLED:
        b_o = tl.where(used, b_o, 0.)
    tl.store(o + (i_b * H + i_h) * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


def longhorn_diagonal_step(args: Arguments, ht: torch.Tensor | None, pool: Pool | None) -> torch.Tensor:
    """One token of B sequences in a single launch: return `o [B, 1, H, V]`, and write the final state to `ht`, where given."""
    args, strides = strided_inputs(args, ('v', 'z', 'g'))
    B, _, H, K, V = args.sizes
    q, k, v, beta, g = args.q, args.k, args.v, args.beta, args.g
    h0 = args.initial_state if pool is None else pool.states
    o = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    kernel, config = longhorn_step_kernel, for_step(launch_key(args))
    kernel[(B * H * triton.cdiv(V, config.BV),)](
        q=q,
        k=k,
        v=v,
        beta=beta,
        D=args.D,
        z=args.z,
        g=g,
        o=o,
        h0=h0,
        ht=ht,
        scale=args.scale,
        s_qb=q.stride(0),
        s_qh=q.stride(2),
        s_qk=q.stride(3),
        s_kb=k.stride(0),
        s_kh=k.stride(2),
        s_kk=k.stride(3),
        s_vb=strides['S_V'],
        s_zb=strides['S_Z'],
        s_gb=None if g is None else strides['S_G'],
        H=H,
        K=K,
        V=V,
        OPTIONS=args.step_options,
        SCALAR_BETA=is_scalar(beta),
        SCALAR_G=is_scalar(g),
        STATE_V_FIRST=args.state_v_first,
        **config.of(kernel),
        **row_arguments(pool, H * K * V),
        **SAME_IN_ALL_LANES,
    )
    return o
