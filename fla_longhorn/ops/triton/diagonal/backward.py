"""Backward kernels of the diagonal update: one walks back along each segment from saved states, one sums channel blocks.

With a = e^g (1 without a gate), P = a S_{t-1}, G_t = dL/dS_t and m = G_t (v / 2 - k P) per entry, per channel
du = sum_j k_j G_t[j]:

    dv = eps du,   deps = sum_j k_j m_j + (v / 2) du,   dbeta = deps f^2  with f = 1 / (1 + beta |k|^2)
    dq_j = scale sum_v dy S_t[j],   dk_j = 2 sum_v eps m_j - 2 k_j sum_v eps^2 deps
    dP = (1 - eps k^2) G_t,   dg = sum_j dP_j P_j,   G_{t-1} = a dP
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.triton.common import (
    FUSED,
    given,
    is_scalar,
    launch_key,
    new_dg,
    no_step,
    norm_slope,
    of_gate,
    padded_state_size,
    strided_inputs,
    with_token_stride,
)
from fla_longhorn.ops.triton.device import card_of, multiprocessor_count
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.backward_steps import (
    backward_block,
    copy_rows,
    from_ring,
    load_four,
    load_keys,
    load_next,
    replay_block,
    ring_offsets,
    to_ring,
)
from fla_longhorn.ops.triton.diagonal.common import locate_segment, prepare_rows, state_offsets
from fla_longhorn.ops.triton.diagonal.configs import (
    PROGRAMS_PER_MULTIPROCESSOR,
    for_backward,
    for_reduce,
    scratch_offset,
    slice_length,
)
from fla_longhorn.ops.triton.slots import first_slot


@triton.heuristics({'MASKED': lambda args: args['V'] % args['BV'] != 0, **given(
    IS_VARLEN='cu_seqlens', HAS_D='D', HAS_Z='z', HAS_G='g',
)})
@triton.jit(do_not_specialize=['T', 'TT', 'N', 'L', 'NS', 'T0', 'TS', 'TP'])
def longhorn_bwd_kernel(
    rows, v, beta, D, z, g, do, states, dh, dv, dbeta, dD, dz, dg, part, scratch, cu_seqlens, T, TT, N, L, NS, T0, TS, TP,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S_V: tl.constexpr, S_Z: tl.constexpr, S_G: tl.constexpr,
    S_DO: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, INTERVAL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, SUMS: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr,
    MASKED: tl.constexpr,
):
    """All gradients of TS tokens from the T0-th of each segment on; of those summed over channels, `part` gets sums over BV.

    A program loops over (segment, head, channel block) with one scratch buffer. For each checkpoint, from the
    last, and each block of BK entries of K, it recomputes the states after it, keeps every fourth, and walks back along
    them. `dh` holds the gradient of the state behind these tokens in each segment slot, and then of the one before them.
    """
    PR: tl.constexpr = 2 * KP + 4
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    S_B: tl.constexpr = H if SCALAR_BETA else H * V
    BT: tl.constexpr = min(INTERVAL, 128)
    o_i = tl.arange(0, BK)[:, None]
    o_x = tl.max_contiguous(tl.arange(0, BV), 1)[None, :]
    # a program's scratch memory has these parts
    p_ring = scratch + tl.program_id(0).to(tl.int64) * scratch_offset('end', INTERVAL, NK, BK, BV, SCALAR_BETA, HAS_G, R)
    p_sums = p_ring + scratch_offset('sums', INTERVAL, NK, BK, BV, SCALAR_BETA, HAS_G, R)
    p_rest = p_ring + scratch_offset('rows', INTERVAL, NK, BK, BV, SCALAR_BETA, HAS_G, R)
    o_ring = ring_offsets(BK, BV)
    V_TYPE: tl.constexpr = v.dtype.element_ty
    BETA_TYPE: tl.constexpr = beta.dtype.element_ty
    DO_TYPE: tl.constexpr = do.dtype.element_ty
    Z_TYPE: tl.constexpr = z.dtype.element_ty if HAS_Z else DO_TYPE
    G_TYPE: tl.constexpr = g.dtype.element_ty if HAS_G else DO_TYPE
    NONE: tl.constexpr = no_step(OPTIONS)
    # the value of channels beyond V; a load without one takes an instruction less
    V_BEYOND: tl.constexpr = 0. if MASKED else None
    BETA_BEYOND: tl.constexpr = NONE if MASKED else None

    for i in range(0, tl.cdiv(NS * H * NV - tl.program_id(0), tl.num_programs(0))):
        i_w = tl.program_id(0) + i * tl.num_programs(0)
        i_v, i_h, i_s = i_w % NV, (i_w // NV) % H, i_w // (NV * H)
        i_n, bos, eos, beg, end, used = locate_segment(i_s, cu_seqlens, T, N, L, IS_VARLEN)
        beg += T0
        n_t = tl.where(used, tl.minimum((end - beg).to(tl.int32), TS), 0)
        o_v = i_v * BV + o_x
        m_v = o_v < V
        b_D = tl.load(D + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32) if HAS_D else tl.zeros([1, BV], dtype=tl.float32)
        b_dD = tl.zeros([1, BV], dtype=tl.float32)
        i_c = (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) + (beg - bos) // INTERVAL) * H + i_h

        p_dh = dh + (i_s.to(tl.int64) * H + i_h) * K * V
        for j in range(0, tl.cdiv(n_t, INTERVAL)):
            i_t = (tl.cdiv(n_t, INTERVAL) - 1 - j) * INTERVAL
            n_c = tl.minimum(n_t - i_t, INTERVAL)
            t = beg + i_t
            p_r = rows + (i_h.to(tl.int64) * TT + t) * R
            p_v = v + (t * S_V + i_h * V + i_v * BV) + o_x
            p_beta = beta + (t * H + i_h) + o_x * 0 if SCALAR_BETA else beta + ((t * H + i_h) * V + i_v * BV) + o_x
            p_do = do + (t * S_DO + i_h * V + i_v * BV) + o_x
            p_z = z + (t * S_Z + i_h * V + i_v * BV) + o_x if HAS_Z else p_v
            p_g = p_v
            if HAS_G:
                p_g = g + (t * S_G + i_h) + o_x * 0 if SCALAR_G else g + (t * S_G + i_h * V + i_v * BV) + o_x
            i_o = (t * H + i_h) * V + i_v * BV
            p_dv = dv + i_o + o_x
            p_dbeta = dbeta + i_o + o_x
            p_dz = dz + i_o + o_x if HAS_Z else p_dv
            p_dg = dg + i_o + o_x if HAS_G else p_dv
            i_p = t if IS_VARLEN else i_s.to(tl.int64) * TS + i_t
            p_token = part + ((i_v * H + i_h).to(tl.int64) * TP + i_p) * PR
            n_b = tl.cdiv(n_c, 4)
            p_last = p_r + (n_b - 1) * 4 * R
            if n_c % 4 != 0:
                # if four rows are in scratch, the offset of a token's row is a constant in each block
                copy_rows(p_rest, p_last, n_c % 4, R, KP)
                p_last = p_rest
            for i_k in range(0, NK):
                o_k = i_k * BK + o_i
                b_h = tl.load(
                    states + (i_c + i_t // INTERVAL * H) * K * V + o_k * V + o_v, mask=(o_k < K) & m_v, other=0.,
                )
                # a pointer that advances with the loop costs two instructions, a recomputed one four
                x_r, x_v, x_beta, x_g, x_ring = p_r, p_v, p_beta, p_g, p_ring
                # prefetch the inputs of the next block: loads don't move up across stores
                vs = load_four(x_v, n_c, m_v, S_V, 0.)
                betas = load_four(x_beta, n_c, m_v, S_B, NONE)
                gs = load_four(x_g, n_c, m_v, S_G, 0.) if HAS_G else vs
                b_keys, ns = load_keys(x_r, x_r + i_k * BK, n_c, R, KP, BK)
                tl.store(x_ring + o_ring, to_ring(b_h))
                for j in range(1, n_b):
                    # the last iteration reloads its own block, so the prefetch needs no bounds check
                    step = tl.where(j + 1 < n_b, 4, 0)
                    x_r, x_v, x_beta, x_ring = x_r + step * R, x_v + step * S_V, x_beta + step * S_B, x_ring + BK * BV
                    x_g += step * S_G
                    m = m_v if MASKED else None
                    next_vs = load_next(x_v, m, S_V, V_BEYOND)
                    next_betas = load_next(x_beta, m, S_B, BETA_BEYOND)
                    next_gs = load_next(x_g, m, S_G, V_BEYOND) if HAS_G else next_vs
                    next_keys, next_ns = load_keys(x_r, x_r + i_k * BK, 4, R, KP, BK)
                    b_h = replay_block(b_h, b_keys, ns, vs, betas, gs, V_TYPE, BETA_TYPE, G_TYPE, OPTIONS, HAS_G)
                    tl.store(x_ring + o_ring, to_ring(b_h))
                    vs, betas, gs, b_keys, ns = next_vs, next_betas, next_gs, next_keys, next_ns
                tl.debug_barrier()

                p_G = p_dh + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
                b_G = tl.load(p_G, mask=(o_k < K) & m_v, other=0.)
                j = n_b - 1
                n_u = n_c - 4 * j
                x_r, x_ring, x_sums = p_last, p_ring + j * BK * BV, p_sums + j * 4
                x_v, x_beta, x_do, x_z = p_v + j * 4 * S_V, p_beta + j * 4 * S_B, p_do + j * 4 * S_DO, p_z + j * 4 * S_Z
                x_dv, x_dbeta, x_dz = p_dv + j * 4 * H * V, p_dbeta + j * 4 * S_B, p_dz + j * 4 * H * V
                x_g, x_dg = p_g + j * 4 * S_G, p_dg + j * 4 * H * V
                x_part = p_token + j * 4 * PR
                vs = load_four(x_v, n_u, m_v, S_V, 0.)
                betas = load_four(x_beta, n_u, m_v, S_B, NONE)
                dos = load_four(x_do, n_u, m_v, S_DO, 0.)
                zs = load_four(x_z, n_u, m_v, S_Z, 0.) if HAS_Z else (0., 0., 0., 0.)
                gs = load_four(x_g, n_u, m_v, S_G, 0.) if HAS_G else (0., 0., 0., 0.)
                b_h = tl.load(x_ring + o_ring)
                for j in range(0, n_b):
                    # the first block has no tokens before it to prefetch
                    step = tl.where(j + 1 < n_b, 4, 0)
                    m = m_v & (tl.full(m_v.shape, 0, tl.int32) < step)
                    x_ring -= step // 4 * BK * BV
                    next_h = tl.load(x_ring + o_ring)
                    x_v, x_beta, x_do, x_z = x_v - step * S_V, x_beta - step * S_B, x_do - step * S_DO, x_z - step * S_Z
                    next_vs = load_next(x_v, m, S_V, V_BEYOND)
                    next_betas = load_next(x_beta, m, S_B, BETA_BEYOND)
                    next_dos = load_next(x_do, m, S_DO, V_BEYOND)
                    next_zs = load_next(x_z, m, S_Z, V_BEYOND) if HAS_Z else zs
                    x_g -= step * S_G
                    next_gs = load_next(x_g, m, S_G, V_BEYOND) if HAS_G else gs
                    b_G, b_dD = backward_block(
                        b_G, b_dD, b_D, from_ring(b_h), vs, betas, dos, zs, gs, i_k, n_u, x_r, x_dv, x_dbeta, x_dz, x_dg,
                        x_sums, x_part, m_v, V_TYPE, BETA_TYPE, DO_TYPE, Z_TYPE, G_TYPE, H, V, S_B, R, PR, KP, NK, BK, BV,
                        INTERVAL, ROWS, SUMS, OPTIONS, HAS_D, HAS_Z, HAS_G, SCALAR_BETA,
                    )
                    vs, betas, dos, zs, gs, b_h = next_vs, next_betas, next_dos, next_zs, next_gs, next_h
                    n_u = n_u * 0 + 4
                    x_r, x_sums = p_r + (n_b - 2 - j) * 4 * R, x_sums - 4
                    x_part -= 4 * PR
                    x_dv, x_dbeta, x_dz, x_dg = x_dv - 4 * H * V, x_dbeta - 4 * S_B, x_dz - 4 * H * V, x_dg - 4 * H * V
                tl.store(p_G, b_G, mask=(o_k < K) & m_v)
            tl.debug_barrier()
            for j in range(0, tl.cdiv(n_c, BT)):
                o_t = j * BT + tl.arange(0, BT)
                p_w = p_sums + tl.arange(0, BV)[:, None] * INTERVAL + o_t[None, :]
                m_c = (o_t < n_c)[None, :]
                # [BT]
                p_t = p_token + o_t * PR + 2 * KP
                tl.store(p_t, tl.sum(tl.load(p_w, mask=m_c, other=0.), 0), mask=o_t < n_c)
                if SCALAR_BETA:
                    tl.store(p_t + 1, tl.sum(tl.load(p_w + INTERVAL * BV, mask=m_c, other=0.), 0), mask=o_t < n_c)
            tl.debug_barrier()

        if HAS_D:
            tl.store(dD + (i_s.to(tl.int64) * H + i_h) * V + o_v, b_dD, mask=m_v)


@triton.jit(do_not_specialize=['T', 'TT', 'L', 'T0', 'TS', 'TP'])
def longhorn_reduce_kernel(
    part, rows, dq, dk, dbeta, scale, T, TT, L, T0, TS, TP, NV: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """The gradients of q, k and a scalar beta: adds the sums of the channel blocks, always in the same order."""
    PR: tl.constexpr = 2 * KP + 4
    i_t, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    o_p, o_k = i_t * BT + tl.arange(0, BT), tl.arange(0, KP)
    o_t, m_t = o_p, o_p < TP
    if not IS_VARLEN:
        # place in the segment, and in the row, which has n_s of them
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
        p_t = part + (((i_v + o_v) * H + i_h)[:, None] * TP + o_p[None, :]) * PR
        # [4, BT, KP]
        p_row, m_row = p_t[:, :, None] + o_k[None, None, :], m_p[:, :, None] & (o_k < K)[None, None, :]
        b_dq += tl.sum(tl.load(p_row, mask=m_row, other=0.), 0)
        b_dk += tl.sum(tl.load(p_row + KP, mask=m_row, other=0.), 0)
        b_w += tl.sum(tl.load(p_t + 2 * KP, mask=m_p, other=0.), 0)
        if SCALAR_BETA:
            b_db += tl.sum(tl.load(p_t + 2 * KP + 1, mask=m_p, other=0.), 0)
    b_k = tl.load(rows + ((i_h * TT + o_t) * R)[:, None] + o_k[None, :], mask=m, other=0.)
    p_d = ((o_t * H + i_h) * K)[:, None] + o_k[None, :]
    tl.store(dq + p_d, (b_dq * scale).to(dq.dtype.element_ty), mask=m)
    tl.store(dk + p_d, (2. * b_dk - (2. * norm_slope(OPTIONS)) * b_k * b_w[:, None]).to(dk.dtype.element_ty), mask=m)
    if SCALAR_BETA:
        tl.store(dbeta + o_t * H + i_h, b_db.to(dbeta.dtype.element_ty), mask=m_t)


def sum_precision(args: Arguments) -> str:
    """How sums over channels, as products with ones, round: AMD's gfx950 has no TF32."""
    if card_of(args.q.device).backend != 'cuda':
        return 'ieee'
    return 'split' if max(args.q.itemsize, args.k.itemsize) > 2 else 'tf32'


def longhorn_bwd_segments(
    rows: torch.Tensor, args: Arguments, strides: dict[str, int], do: torch.Tensor, dh: torch.Tensor, states: torch.Tensor, *,
    L: int,
) -> tuple[torch.Tensor | None, ...]:
    """Backward through every segment of L tokens from the state's gradient in `dh`, which becomes that at the segment's start.

    Returns (dq, dk, dv, dbeta, dD, dz, dg). Slices of the segments run in turn and share one buffer for the partial sums.
    """
    q, k, v, beta, D, z, g = args.q, args.k, args.v, args.beta, args.D, args.z, args.g
    B, T, H, K, V = args.sizes
    N, interval = args.num_sequences, checkpoint_interval(K)
    scalar_beta, is_varlen = beta.dim() == 3, args.cu_seqlens is not None
    KP, config, reduce = padded_state_size(K), for_backward(launch_key(args)), for_reduce(launch_key(args))
    kernel, reduce_kernel = longhorn_bwd_kernel, longhorn_reduce_kernel
    BK, BV = config.BK, config.BV
    NS, NV, NK = num_checkpoints(B, T, N, L, is_varlen), triton.cdiv(V, BV), triton.cdiv(K, BK)
    programs = min(NS * H * NV, PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(q.device))
    R = rows.shape[-1]
    # each program loops over the work with one scratch, so there are no more than run at once
    floats = programs * scratch_offset('end', interval, NK, BK, BV, scalar_beta, g is not None, R)

    def fresh(x):
        return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)

    dq, dk, dv, dbeta, dz, dg = fresh(q), fresh(k), fresh(v), fresh(beta), fresh(z), new_dg(g, v)
    f32: dict[str, Any] = dict(dtype=torch.float32, device=v.device)
    TS = slice_length(min(L, T), K, is_varlen)
    TP = B * T if is_varlen else NS * TS
    slices = triton.cdiv(min(L, T), TS)
    part, scratch = torch.empty(NV, H, TP, 2 * KP + 4, **f32), torch.empty(floats, **f32)
    dD = None if D is None else torch.empty(slices, NS, H, V, **f32)
    for i in reversed(range(slices)):
        kernel[(programs,)](
            rows, v, beta, D, z, g, do, states, dh, dv, dbeta, None if dD is None else dD[i], dz, dg, part, scratch,
            args.cu_seqlens, T, B * T, N, L, NS, i * TS, TS, TP, H=H, K=K, V=V, **strides, R=R, KP=KP, INTERVAL=interval,
            **config.of(kernel), SUMS=sum_precision(args), OPTIONS=args.step_options, SCALAR_BETA=scalar_beta,
            SCALAR_G=is_scalar(g), STATE_V_FIRST=args.state_v_first, **FUSED,
        )
        reduce_kernel[(triton.cdiv(TP, reduce.BT) * H,)](
            part, rows, dq, dk, dbeta, args.scale, T, B * T, L, i * TS, TS, TP, NV=NV, H=H, K=K, R=R, KP=KP,
            OPTIONS=args.step_options, SCALAR_BETA=scalar_beta, IS_VARLEN=is_varlen, **reduce.of(reduce_kernel), **FUSED,
        )
    return dq, dk, dv, dbeta, None if D is None or dD is None else dD.sum((0, 1)).to(D.dtype), dz, of_gate(dg, g)


def longhorn_diagonal_bwd(
    do: torch.Tensor, dht: torch.Tensor | None, states: torch.Tensor, args: Arguments, *, parallel: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, beta, the initial state, D and z (`None` for an absent one), and that of g if given."""
    args, strides = strided_inputs(args, ('v', 'z', 'g'))
    q, T = args.q, args.q.shape[1]
    do, strides['S_DO'] = with_token_stride(do)

    # twice as many segments as programs: backward runs two in turn, and the summaries' programs fit twice as often
    L = segments.segment_length(args, parallel, for_backward(launch_key(args)).BV, rounds=2)
    rows = prepare_rows(args, squares=L <= T)
    if L <= T:
        decay, local = segments.summarize_segments(rows, args, do, L=L)
        dht = None if dht is None else dht.float().contiguous()
        dh = segments.combine_segments(decay, local, dht, args, L=L, reverse=True)
    elif dht is None:
        dh = q.new_zeros(args.state_shape, dtype=torch.float32)
    else:
        dh = dht.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    dq, dk, dv, dbeta, dD, dz, dg = longhorn_bwd_segments(rows, args, strides, do, dh, states, L=L)
    dh0 = None if args.initial_state is None else first_segments(dh, args, L)
    gradients = (dq, dk, dv, dbeta, dh0, dD, dz)
    return gradients if args.g is None else (*gradients, dg)


def first_segments(x: torch.Tensor, args: Arguments, L: int) -> torch.Tensor:
    """The slots of each sequence's first segment in `x`, which has a slot for each segment of L tokens."""
    if args.cu_seqlens is None:
        return x[::len(x) // args.num_sequences].contiguous()
    bos = args.cu_seqlens[:-1]
    return x[bos // L + torch.arange(len(bos), dtype=bos.dtype, device=bos.device)]
