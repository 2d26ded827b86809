"""Parallel along the sequence: each segment's decay and its end state from zero, and their combination in order.

A segment of L tokens maps the state that enters it to `decay * state + local`, elementwise on `[K, V]`, and the gradient
that leaves it backwards likewise. Segments combine by `(a2 a1, a2 b1 + b2)`. Slots are those of `ops/checkpoints.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import (
    FUSED,
    decays,
    is_scalar,
    launch_key,
    sigmoid,
    step_sizes,
    strided_inputs,
    with_token_stride,
)
from fla_longhorn.ops.triton.device import card_of
from fla_longhorn.ops.triton.diagonal.common import (
    MIN_SEGMENT_LENGTH,
    PROGRAMS_PER_MULTIPROCESSOR,
    channel_offsets,
    channel_pointers,
    for_segments,
    from_word,
    load_inputs,
    load_rows,
    locate_segment,
    padded,
    state_offsets,
    unstack,
)
from fla_longhorn.ops.triton.slots import first_slot, locate_states, only_if, row_arguments, sequence_range


def segment_length(args: Arguments, parallel: bool, channels: int, rounds: int = 1) -> int:
    """Segment length in tokens, for programs of one warp with `channels` channels each."""
    _, T, H, K, V = args.sizes
    if not parallel:
        return one_segment(T, K)
    return choose_segment_length(T, args.num_sequences * H * triton.cdiv(V, channels), K, args.q.device, rounds)


def choose_segment_length(T: int, blocks: int, K: int, device: torch.device, rounds: int = 1) -> int:
    """Tokens to a segment, a multiple of the checkpoint interval, for rows of T tokens and `blocks` programs a segment.

    One segment where the blocks fill at least half of the device, because segments double the arithmetic. Else as many as
    fit on the device at a time, or `rounds` times as many.
    """
    wanted = PROGRAMS_PER_MULTIPROCESSOR * card_of(device).multiprocessors // blocks
    L = one_segment(T, K)
    if wanted > 2:
        L = min(L, max(triton.cdiv(T, rounds * wanted), MIN_SEGMENT_LENGTH))
    return round_up(L, checkpoint_interval(K))


def one_segment(T: int, K: int) -> int:
    """A segment length above T, so that every sequence is one segment."""
    return round_up(T + 1, checkpoint_interval(K))


def round_up(x: int, multiple: int) -> int:
    return triton.cdiv(x, multiple) * multiple


@triton.jit(do_not_specialize=['T', 'N', 'L'])
def longhorn_segment_kernel(
    kq,
    x,
    beta,
    z,
    g,
    decay,
    local,
    cu_seqlens,
    T,
    N,
    L,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S_X: tl.constexpr,
    S_Z: tl.constexpr,
    S_G: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    U: tl.constexpr,
    REVERSE: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """Decay product of a segment, and its end state from zero; REVERSE: the gradient at its start, from zero at its end.

    With a_t = e^g_t (1 - eps_t k_t^2): S = a_t S + k_t (eps_t v_t), or backwards G = a_t (G + q_t dy_t); x is v, or do.
    """
    i_p = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    KP: tl.constexpr = padded(K)
    i_v, i_k, i_h, i_s = i_p % NV, i_p // NV % NK, (i_p // (NV * NK)) % H, i_p // (NV * NK * H)
    _, _, _, beg, end, used = locate_segment(i_s, cu_seqlens, T, N, L, cu_seqlens is not None)
    if not used:
        return

    # tokens are visited in steps of STEP
    STEP: tl.constexpr = -1 if REVERSE else 1
    S_B: tl.constexpr = H if SCALAR_BETA else H * V
    STRIDES: tl.constexpr = (STEP * S_X, STEP * S_B, STEP * S_G, STEP * S_Z)
    S_KQ: tl.constexpr = STEP * H * (2 * KP + 4)
    n_t = (end - beg).to(tl.int32)
    t = tl.maximum(end - 1, beg) if REVERSE else beg
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = channel_offsets(i_v, BV)
    m_v = o_v < V
    p_row = kq + (t * H + i_h) * (2 * KP + 4)
    p_x = channel_pointers(x, t, i_h, o_v, S_X, V, False)
    p_beta = channel_pointers(beta, t, i_h, o_v, S_B, V, SCALAR_BETA)
    p_g = channel_pointers(g, t, i_h, o_v, S_G, V, SCALAR_G) if g is not None else p_x
    p_z = channel_pointers(z, t, i_h, o_v, S_Z, V, False) if z is not None else p_x
    # [BK, BV]
    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    b_a = tl.full([BK, BV], 1., dtype=tl.float32)
    # the inputs, which are in no cache, are prefetched a block ahead
    xs = load_inputs((p_x, p_beta, p_g, p_z), 0, n_t, m_v, STRIDES, OPTIONS, U)
    for i_t in range(0, n_t, U):
        p_x, p_beta, p_g, p_z = p_x + U * STRIDES[0], p_beta + U * STRIDES[1], p_g + U * STRIDES[2], p_z + U * STRIDES[3]
        next_xs = load_inputs((p_x, p_beta, p_g, p_z), 0, n_t - i_t - U, m_v, STRIDES, OPTIONS, U)
        b_keys, ns = load_rows(p_row, o_k, n_t - i_t, KP, S_KQ, U)
        b_queries = load_rows(p_row, KP + o_k, n_t - i_t, KP, S_KQ, U)[0]
        ks, qs = unstack(b_keys), unstack(b_queries)
        for u in tl.static_range(U):
            b_x, b_eps = from_word(xs[0][u], x), step_sizes(from_word(xs[1][u], beta), ns[u], OPTIONS)
            b_decay = 1. - ks[u] * (ks[u] * b_eps)
            if g is not None:
                b_decay *= decays(from_word(xs[2][u], g))
            if REVERSE:
                if z is not None:
                    b_z = from_word(xs[3][u], z)
                    b_x *= b_z * sigmoid(b_z)
                b_h = b_decay * (b_h + qs[u] * b_x)
            else:
                b_h = b_decay * b_h + ks[u] * (b_eps * b_x)
            b_a *= b_decay
        p_row += U * S_KQ
        xs = next_xs
    o_k = o_k[:, None]
    o_h = (i_s.to(tl.int64) * H + i_h) * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
    tl.store(local + o_h, b_h, mask=(o_k < K) & m_v)
    tl.store(decay + o_h, b_a, mask=(o_k < K) & m_v)


@triton.jit(do_not_specialize=['T', 'L'])
def longhorn_combine_kernel(
    decay,
    local,
    start,
    bounds,
    cu_seqlens,
    T,
    L,
    state_indices,
    final_state_indices,
    has_initial_state,
    pad_slot_id,
    s_h,
    H: tl.constexpr,
    KV: tl.constexpr,
    BS: tl.constexpr,
    REVERSE: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Write the state that enters each segment of a sequence: x = start, then x = decay x + local, segment by segment.

    With POOLED, `start` is a pool whose rows are given by the indices.
    """
    i_p = tl.program_id(0)
    NS: tl.constexpr = (KV + BS - 1) // BS
    i_e, i_h, i_n = i_p % NS, (i_p // NS) % H, i_p // (NS * H)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, cu_seqlens is not None)
    i_s = first_slot(bos, i_n, T, L, cu_seqlens is not None)
    n_s = tl.maximum(tl.cdiv(T_n, L), 1)
    o_e = i_e * BS + tl.arange(0, BS)
    m_e = o_e < KV
    i_r, m_r = i_n.to(tl.int64), m_e
    if POOLED:
        i_r, _, read, _, _ = locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        m_r = only_if(read, m_e)
    if start is not None:
        b_x = tl.load(start + i_r * s_h + i_h * KV + o_e, mask=m_r, other=0.)
    else:
        b_x = tl.zeros([BS], dtype=tl.float32)
    for i in range(0, n_s):
        i_l = i_s + (n_s - 1 - i if REVERSE else i)
        p_e = (i_l * H + i_h) * KV + o_e
        tl.store(bounds + p_e, b_x, mask=m_e)
        b_x = tl.load(decay + p_e, mask=m_e, other=0.) * b_x + tl.load(local + p_e, mask=m_e, other=0.)


def summarize_segments(
    kq: torch.Tensor, args: Arguments, do: torch.Tensor | None = None, *, L: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decay, local), each float32 `[S, H, K, V]`, of segments of L tokens; with `do`, of the state's gradient, in reverse."""
    (B, T, H, V), K, is_varlen = args.v.shape, args.k.shape[-1], args.cu_seqlens is not None
    args, strides = strided_inputs(args, ('g',))
    beta, g, (x, s_x) = args.beta, args.g, with_token_stride(args.v if do is None else do)
    z, s_z = (None, 0) if args.z is None or do is None else with_token_stride(args.z)
    N = args.num_sequences
    S = num_checkpoints(B, T, N, L, is_varlen)
    decay, local = (x.new_empty((S, *args.state_shape[1:]), dtype=torch.float32) for _ in range(2))
    kernel, config = longhorn_segment_kernel, for_segments(launch_key(args))
    kernel[(S * H * triton.cdiv(K, config.BK) * triton.cdiv(V, config.BV),)](
        kq=kq,
        x=x,
        beta=beta,
        z=z,
        g=g,
        decay=decay,
        local=local,
        cu_seqlens=args.cu_seqlens,
        T=T,
        N=N,
        L=L,
        H=H,
        K=K,
        V=V,
        S_X=s_x,
        S_Z=s_z,
        S_G=strides['S_G'],
        REVERSE=do is not None,
        OPTIONS=args.step_options,
        SCALAR_BETA=is_scalar(beta),
        SCALAR_G=is_scalar(g),
        STATE_V_FIRST=args.state_v_first,
        **config.of(kernel),
        **FUSED,
    )
    return decay, local


def combine_segments(
    decay: torch.Tensor,
    local: torch.Tensor,
    start: torch.Tensor | None,
    args: Arguments,
    *,
    L: int,
    reverse: bool,
    pool: Pool | None = None,
) -> torch.Tensor:
    """What enters each segment `[S, H, K, V]`, given what enters each sequence (`start`, zero if None).

    With `pool`, `start` is a pool that holds them in these rows.
    """
    bounds = torch.empty_like(decay)
    (_, T, H, K, V), BS = args.sizes, 128
    KV = K * V
    longhorn_combine_kernel[(args.num_sequences * H * triton.cdiv(KV, BS),)](
        decay=decay,
        local=local,
        start=start,
        bounds=bounds,
        cu_seqlens=args.cu_seqlens,
        T=T,
        L=L,
        H=H,
        KV=KV,
        BS=BS,
        REVERSE=reverse,
        num_warps=1,
        **row_arguments(pool, KV * H),
        **FUSED,
    )
    return bounds
