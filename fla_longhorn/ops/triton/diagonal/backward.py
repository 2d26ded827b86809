"""Backward kernels of the diagonal update: one walks back along each segment from saved states, one sums channel blocks.

With b = e^g (1 without a gate), P = b S_{t-1}, G_t = dL/dS_t and m = G_t (v / 2 - k P) per entry, per channel
du = sum_j k_j G_t[j]:

    dv = eps du,   deps = sum_j k_j m_j + (v / 2) du,   dbeta = deps f^2  with f = 1 / (1 + beta |k|^2)
    dq_j = scale sum_v dy S_t[j],   dk_j = 2 sum_v eps m_j - 2 k_j sum_v eps^2 deps
    G_{t-1} = b (1 - eps k^2) G_t,   dg = sum_j G_{t-1}[j] S_{t-1}[j]

dy is the gradient of y = q^T S; in the kernels G is `dh`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments, Gradients
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.triton.common import (
    FUSED,
    is_scalar,
    launch_key,
    new_dg,
    norm_slope,
    of_gate,
    padded_state_size,
    strided_inputs,
    with_token_stride,
)
from fla_longhorn.ops.triton.device import card_of
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.backward_steps import backward_block, from_saved, replay_block, saved_offsets, to_saved
from fla_longhorn.ops.triton.diagonal.common import (
    CHANNELS,
    PROGRAMS_PER_MULTIPROCESSOR,
    channel_offsets,
    channel_pointers,
    for_backward,
    load_inputs,
    load_rows,
    locate_segment,
    padded,
    prepare_rows,
    scratch_sizes,
    slice_length,
    state_offsets,
)
from fla_longhorn.ops.triton.slots import first_slot


@triton.jit(do_not_specialize=['T', 'N', 'L', 'NS', 'T0', 'TS'])
def longhorn_bwd_kernel(
    kq,
    v,
    beta,
    D,
    z,
    g,
    do,
    states,
    dh,
    dv,
    dbeta,
    dD,
    dz,
    dg,
    part,
    scratch,
    cu_seqlens,
    T,
    N,
    L,
    NS,
    T0,
    TS,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S_V: tl.constexpr,
    S_Z: tl.constexpr,
    S_G: tl.constexpr,
    S_DO: tl.constexpr,
    INTERVAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    U: tl.constexpr,
    SUM_PRECISION: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
):
    """All gradients of TS tokens from the T0-th of each segment on; of those summed over channels, `part` gets sums over BV.

    A program loops over (segment, head, channel block) with one scratch buffer. For each interval, from the last, and each
    block of BK entries of K, it recomputes the states in it, saves one for each block of tokens, and walks back along them.
    `dh` holds the gradient of the state behind these tokens in each segment slot, and then of the one before them.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    HAS_D: tl.constexpr = D is not None
    HAS_Z: tl.constexpr = z is not None
    HAS_G: tl.constexpr = g is not None
    KP: tl.constexpr = padded(K)
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    BT: tl.constexpr = 32
    S_KQ: tl.constexpr = H * (2 * KP + 4)
    S_P: tl.constexpr = 2 * KP + 4
    S_O: tl.constexpr = H * V
    STRIDES: tl.constexpr = (S_V, H if SCALAR_BETA else H * V, S_G, S_DO, S_Z)
    SIZES: tl.constexpr = scratch_sizes(INTERVAL, NK, BK, BV, U, SCALAR_BETA, HAS_G)
    o_i, o_x = tl.arange(0, BK)[:, None], tl.arange(0, BV)[None, :]
    p_saved = scratch + tl.program_id(0).to(tl.int64) * (SIZES[0] + SIZES[1]) + saved_offsets(BK, BV)
    p_sums = scratch + tl.program_id(0).to(tl.int64) * (SIZES[0] + SIZES[1]) + SIZES[0]
    # tokens in `part`
    TP = T if IS_VARLEN else NS * TS

    for i in range(0, tl.cdiv(NS * H * NV - tl.program_id(0), tl.num_programs(0))):
        i_w = tl.program_id(0) + i * tl.num_programs(0)
        i_v, i_h, i_s = i_w % NV, (i_w // NV) % H, i_w // (NV * H)
        i_n, bos, eos, beg, end, used = locate_segment(i_s, cu_seqlens, T, N, L, IS_VARLEN)
        beg += T0
        n_t = tl.where(used, tl.minimum((end - beg).to(tl.int32), TS), 0)
        o_v = channel_offsets(i_v, BV)
        m_v = o_v < V
        b_D = tl.load(D + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32) if HAS_D else 0.
        b_dD = tl.zeros([1, BV], dtype=tl.float32)
        i_c = (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) + (beg - bos) // INTERVAL) * H + i_h

        for j in range(tl.cdiv(n_t, INTERVAL) - 1, -1, -1):
            i_t = j * INTERVAL
            n_c = tl.minimum(n_t - i_t, INTERVAL)
            n_b = tl.cdiv(n_c, U)
            t = beg + i_t
            p_row = kq + (t * H + i_h) * (2 * KP + 4)
            p_v = channel_pointers(v, t, i_h, o_v, S_V, V, False)
            ps = (
                p_v,
                channel_pointers(beta, t, i_h, o_v, STRIDES[1], V, SCALAR_BETA),
                channel_pointers(g, t, i_h, o_v, S_G, V, SCALAR_G) if HAS_G else p_v,
                channel_pointers(do, t, i_h, o_v, S_DO, V, False),
                channel_pointers(z, t, i_h, o_v, S_Z, V, False) if HAS_Z else p_v,
            )
            o_o = (t * H + i_h) * V + o_v
            outs = (dv + o_o, dbeta + o_o, dg + o_o if HAS_G else dv + o_o, dz + o_o if HAS_Z else dv + o_o)
            i_p = t if IS_VARLEN else i_s.to(tl.int64) * TS + i_t
            p_part = part + ((i_v * H + i_h).to(tl.int64) * TP + i_p) * S_P
            for i_k in range(0, NK):
                o_k = i_k * BK + o_i
                m_h = (o_k < K) & m_v
                b_h = tl.load(states + (i_c + j * H) * K * V + o_k * V + o_v, mask=m_h, other=0.)
                # the inputs of the next block are prefetched: loads don't move up across stores
                xs = load_inputs(ps[:3], 0, n_c, m_v, STRIDES, OPTIONS, U)
                b_keys, ns = load_rows(p_row, i_k * BK + tl.arange(0, BK), n_c, KP, S_KQ, U)
                tl.store(p_saved, to_saved(b_h))
                for i_b in range(1, n_b):
                    # none after the last block whose tokens are replayed
                    n_u = tl.where(i_b + 1 < n_b, U, 0)
                    next_xs = load_inputs(ps[:3], i_b * U, n_u, m_v, STRIDES, OPTIONS, U)
                    p_next = p_row + i_b * U * S_KQ
                    next_keys, next_ns = load_rows(p_next, i_k * BK + tl.arange(0, BK), tl.maximum(n_u, 1), KP, S_KQ, U)
                    b_h = replay_block(b_h, b_keys, ns, xs, ps, OPTIONS, HAS_G)
                    tl.store(p_saved + i_b * BK * BV, to_saved(b_h))
                    xs, b_keys, ns = next_xs, next_keys, next_ns
                # a thread reads what others wrote
                tl.debug_barrier()

                p_dh = dh + (i_s.to(tl.int64) * H + i_h) * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
                b_dh = tl.load(p_dh, mask=m_h, other=0.)
                n_u = n_c - (n_b - 1) * U
                xs = load_inputs(ps, (n_b - 1) * U, n_u, m_v, STRIDES, OPTIONS, U)
                b_x = tl.load(p_saved + (n_b - 1) * BK * BV)
                for i_b in range(n_b - 1, -1, -1):
                    next_xs = load_inputs(ps, (i_b - 1) * U, tl.minimum(i_b, 1) * U, m_v, STRIDES, OPTIONS, U)
                    next_x = tl.load(p_saved + tl.maximum(i_b - 1, 0) * BK * BV)
                    t_b = i_b * U
                    b_dh, b_dD = backward_block(
                        b_dh, b_dD, b_D, from_saved(b_x), xs, ps,
                        (outs[0] + t_b * S_O, outs[1] + t_b * S_O, outs[2] + t_b * S_O, outs[3] + t_b * S_O),
                        p_row + t_b * S_KQ, p_sums + t_b * BV + o_x, p_part + t_b * S_P, i_k, n_u, m_v,
                        V, KP, NK, INTERVAL, S_KQ, S_O, OPTIONS, SUM_PRECISION, SCALAR_BETA, HAS_D, HAS_Z, HAS_G,
                    )
                    xs, b_x, n_u = next_xs, next_x, n_u * 0 + U
                tl.store(p_dh, b_dh, mask=m_h)
            tl.debug_barrier()
            for i_b in range(0, tl.cdiv(n_c, BT)):
                o_t = i_b * BT + tl.arange(0, BT)
                m_t = o_t < n_c
                p_w = p_sums + o_t[:, None] * BV + o_x
                # [BT]
                p_t = p_part + o_t * S_P + 2 * KP
                tl.store(p_t, tl.sum(tl.load(p_w, mask=m_t[:, None], other=0.), 1), mask=m_t)
                if SCALAR_BETA:
                    tl.store(p_t + 1, tl.sum(tl.load(p_w + INTERVAL * BV, mask=m_t[:, None], other=0.), 1), mask=m_t)
            # the next interval writes there
            tl.debug_barrier()

        if HAS_D:
            tl.store(dD + (i_s.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=m_v)


@triton.jit(do_not_specialize=['T', 'L', 'NS', 'T0', 'TS'])
def longhorn_reduce_kernel(
    part,
    kq,
    dq,
    dk,
    dbeta,
    scale,
    T,
    L,
    NS,
    T0,
    TS,
    NV: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """The gradients of q, k and a scalar beta: adds the sums of the channel blocks, always in the same order."""
    KP: tl.constexpr = padded(K)
    S_P: tl.constexpr = 2 * KP + 4
    TP = T if IS_VARLEN else NS * TS
    i_t, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    o_p, o_k = i_t * BT + tl.arange(0, BT), tl.arange(0, KP)
    o_t, m_t = o_p, o_p < TP
    if not IS_VARLEN:
        # place in the segment, and in the sequence, which has n_s of them
        n_s, i_s, i_x = tl.cdiv(T, L), o_p // TS, T0 + o_p % TS
        i_x, m_t = i_s % n_s * L + i_x, m_t & (i_x < L)
        o_t, m_t = i_s // n_s * T + i_x, m_t & (i_x < T)
    o_p, o_t = o_p.to(tl.int64), o_t.to(tl.int64)
    m = m_t[:, None] & (o_k < K)[None, :]
    b_dq, b_dk = tl.zeros([BT, KP], dtype=tl.float32), tl.zeros([BT, KP], dtype=tl.float32)
    b_w, b_db = tl.zeros([BT], dtype=tl.float32), tl.zeros([BT], dtype=tl.float32)
    o_v = tl.arange(0, 4)
    for i_v in range(0, NV, 4):
        # four blocks of channels at a time, whose loads wait together: [4, BT]
        m_p = (i_v + o_v < NV)[:, None] & m_t[None, :]
        p_t = part + (((i_v + o_v) * H + i_h)[:, None] * TP + o_p[None, :]) * S_P
        # [4, BT, KP]
        p_row, m_row = p_t[:, :, None] + o_k[None, None, :], m_p[:, :, None] & (o_k < K)[None, None, :]
        b_dq += tl.sum(tl.load(p_row, mask=m_row, other=0.), 0)
        b_dk += tl.sum(tl.load(p_row + KP, mask=m_row, other=0.), 0)
        b_w += tl.sum(tl.load(p_t + 2 * KP, mask=m_p, other=0.), 0)
        if SCALAR_BETA:
            b_db += tl.sum(tl.load(p_t + 2 * KP + 1, mask=m_p, other=0.), 0)
    b_k = tl.load(kq + ((o_t * H + i_h) * S_P)[:, None] + o_k[None, :], mask=m, other=0.)
    p_d = ((o_t * H + i_h) * K)[:, None] + o_k[None, :]
    tl.store(dq + p_d, (b_dq * scale).to(dq.dtype.element_ty), mask=m)
    tl.store(dk + p_d, (2. * b_dk - (2. * norm_slope(OPTIONS)) * b_k * b_w[:, None]).to(dk.dtype.element_ty), mask=m)
    if SCALAR_BETA:
        tl.store(dbeta + o_t * H + i_h, b_db.to(dbeta.dtype.element_ty), mask=m_t)


def sum_precision(args: Arguments) -> str:
    """How sums over channels, as products with ones, round: AMD's gfx950 has no TF32."""
    if card_of(args.q.device).backend != 'cuda':
        return 'ieee'
    return 'tf32x3' if max(args.q.itemsize, args.k.itemsize) > 2 else 'tf32'


def longhorn_bwd_segments(
    kq: torch.Tensor, args: Arguments, strides: dict[str, int], do: torch.Tensor, dh: torch.Tensor, states: torch.Tensor, *,
    L: int,
) -> Gradients:
    """Backward through every segment of L tokens from the state's gradient in `dh`, which becomes that at the segment's start.

    Returns all gradients but that of the initial state. Slices of the segments run in turn and share one buffer for the
    partial sums.
    """
    q, k, v, beta, D, z, g = args.q, args.k, args.v, args.beta, args.D, args.z, args.g
    B, T, H, K, V = args.sizes
    N, interval = args.num_sequences, checkpoint_interval(K)
    scalar_beta, is_varlen = is_scalar(beta), args.cu_seqlens is not None
    key = launch_key(args)
    kernel, config = longhorn_bwd_kernel, for_backward(key, g is not None, args.use_beta_sigmoid_in_kernel)
    # tokens of a program that reduces
    BT = max(256 // padded_state_size(K), 2)
    BK, BV = config.BK, config.BV
    NS, NV, NK = num_checkpoints(B, T, N, L, is_varlen), triton.cdiv(V, BV), triton.cdiv(K, BK)
    # each program loops over the work with one scratch buffer, so there are no more than run at once
    programs = min(NS * H * NV, PROGRAMS_PER_MULTIPROCESSOR * card_of(q.device).multiprocessors)
    floats = programs * sum(scratch_sizes(interval, NK, BK, BV, config.U, scalar_beta, g is not None))

    def fresh(x):
        return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    dq, dk, dv, dbeta, dz, dg = fresh(q), fresh(k), fresh(v), fresh(beta), fresh(z), new_dg(g, v)
    f32: dict[str, Any] = dict(dtype=torch.float32, device=v.device)
    TS = slice_length(min(L, T), K, is_varlen)
    TP = B * T if is_varlen else NS * TS
    slices = triton.cdiv(min(L, T), TS)
    part, scratch = torch.empty(NV, H, TP, 2 * padded_state_size(K) + 4, **f32), torch.empty(floats, **f32)
    dD = None if D is None else torch.empty(slices, NS, H, V, **f32)
    shared: dict[str, Any] = dict(
        T=T,
        L=L,
        NS=NS,
        TS=TS,
        H=H,
        K=K,
        OPTIONS=args.step_options,
        SCALAR_BETA=scalar_beta,
        **FUSED,
    )
    for i in reversed(range(slices)):
        kernel[(programs,)](
            kq=kq,
            v=v,
            beta=beta,
            D=D,
            z=z,
            g=g,
            do=do,
            states=states,
            dh=dh,
            dv=dv,
            dbeta=dbeta,
            dD=None if dD is None else dD[i],
            dz=dz,
            dg=dg,
            part=part,
            scratch=scratch,
            cu_seqlens=args.cu_seqlens,
            N=N,
            T0=i * TS,
            V=V,
            INTERVAL=interval,
            SUM_PRECISION=sum_precision(args),
            SCALAR_G=is_scalar(g),
            STATE_V_FIRST=args.state_v_first,
            **strides,
            **shared,
            **config.of(kernel),
        )
        longhorn_reduce_kernel[(triton.cdiv(TP, BT) * H,)](
            part=part,
            kq=kq,
            dq=dq,
            dk=dk,
            dbeta=dbeta,
            scale=args.scale,
            T0=i * TS,
            NV=NV,
            IS_VARLEN=is_varlen,
            BT=BT,
            num_warps=2,
            **shared,
        )
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        beta=dbeta,
        D=None if D is None or dD is None else dD.sum((0, 1)).to(D.dtype),
        z=dz,
        g=of_gate(dg, g),
    )


def longhorn_diagonal_bwd(
    do: torch.Tensor, dht: torch.Tensor | None, states: torch.Tensor, args: Arguments, *, parallel: bool,
) -> Gradients:
    args, strides = strided_inputs(args, ('v', 'z', 'g'))
    q, T = args.q, args.q.shape[1]
    do, strides['S_DO'] = with_token_stride(do)

    # twice as many segments as programs: backward runs two in turn, and the summaries' programs fit twice as often
    L = segments.segment_length(args, parallel, CHANNELS, rounds=2)
    kq = prepare_rows(args)
    if L <= T:
        decay, local = segments.summarize_segments(kq, args, do, L=L)
        dht = None if dht is None else dht.float().contiguous()
        dh = segments.combine_segments(decay, local, dht, args, L=L, reverse=True)
    elif dht is None:
        dh = q.new_zeros(args.state_shape, dtype=torch.float32)
    else:
        dh = dht.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    gradients = longhorn_bwd_segments(kq, args, strides, do, dh, states, L=L)
    return gradients if args.initial_state is None else gradients._replace(initial_state=first_segments(dh, args, L))


def first_segments(x: torch.Tensor, args: Arguments, L: int) -> torch.Tensor:
    """The slots of each sequence's first segment in `x`, which has a slot for each segment of L tokens."""
    if args.cu_seqlens is None:
        return x[::len(x) // args.num_sequences].contiguous()
    bos = args.cu_seqlens[:-1]
    return x[bos // L + torch.arange(len(bos), dtype=bos.dtype, device=bos.device)]
