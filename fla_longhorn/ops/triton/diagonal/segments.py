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
    given,
    is_scalar,
    launch_key,
    no_step,
    padded_state_size,
    sigmoid,
    step_sizes,
    strided_inputs,
    with_token_stride,
)
from fla_longhorn.ops.triton.device import multiprocessor_count
from fla_longhorn.ops.triton.diagonal.backward_steps import from_word, load_four, load_keys, load_next
from fla_longhorn.ops.triton.diagonal.common import load_masked, locate_segment, state_offsets, unstack
from fla_longhorn.ops.triton.diagonal.configs import MIN_SEGMENT_LENGTH, PROGRAMS_PER_MULTIPROCESSOR, for_combine, for_segments
from fla_longhorn.ops.triton.slots import first_slot, locate_states, only_if, row_arguments


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
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessor_count(device) // blocks
    L = one_segment(T, K)
    if wanted > 2:
        L = min(L, max(triton.cdiv(T, rounds * wanted), MIN_SEGMENT_LENGTH))
    return round_up(L, checkpoint_interval(K))


def one_segment(T: int, K: int) -> int:
    """A segment length above T, so that every sequence is one segment."""
    return round_up(T + 1, checkpoint_interval(K))


def round_up(x: int, multiple: int) -> int:
    return triton.cdiv(x, multiple) * multiple


@triton.jit
def load_tiles(p_r, i_k, n_u, R: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, REVERSE: tl.constexpr):
    """Of four tokens, of which n_u exist: their keys `[BK, 4]`, or with REVERSE queries and squares of keys, and |k|^2."""
    if REVERSE:
        b_q, ns = load_keys(p_r, p_r + KP + i_k * BK, n_u, R, KP, BK)
        b_squares, _ = load_keys(p_r, p_r + 2 * KP + 4 + i_k * BK, n_u, R, KP, BK)
        return b_q, b_squares, ns
    else:
        b_k, ns = load_keys(p_r, p_r + i_k * BK, n_u, R, KP, BK)
        return b_k, b_k, ns


@triton.jit
def segment_token(b_h, b_a, b_k, b_squares, b_n, b_x, b_beta, b_z, b_g, REVERSE: tl.constexpr, OPTIONS: tl.constexpr):
    """The state after one token more, or with REVERSE its gradient before one, and the product of all decays.

    b_k is the token's key, or with REVERSE its query, and b_squares then are those of its key. b_z and b_g may be None.
    """
    b_eps = step_sizes(b_beta, b_n, OPTIONS)
    if REVERSE:
        if b_z is not None:
            b_x *= b_z * sigmoid(b_z)
        b_decay = 1. - b_eps * b_squares
        if b_g is not None:
            b_decay *= decays(b_g)
        b_h = b_decay * (b_h + b_k * b_x)
    else:
        b_decay = 1. - b_k * (b_k * b_eps)
        if b_g is not None:
            b_decay *= decays(b_g)
        b_h = b_decay * b_h + b_k * (b_eps * b_x)
    return b_h, b_a * b_decay


@triton.heuristics({'MASKED': lambda args: args['V'] % args['BV'] != 0, **given(IS_VARLEN='cu_seqlens', HAS_Z='z', HAS_G='g')})
@triton.jit(do_not_specialize=['T', 'TT', 'N', 'L'])
def longhorn_segment_kernel(
    rows, x, beta, z, g, decay, local, cu_seqlens, T, TT, N, L, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    S_X: tl.constexpr, S_Z: tl.constexpr, S_G: tl.constexpr, R: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, REVERSE: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, IS_VARLEN: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr, MASKED: tl.constexpr,
):
    """Decay product of a segment, and its end state from zero; REVERSE: the gradient at its start, from zero at its end.

    With a_t = e^g_t (1 - eps_t k_t^2): S = a_t S + k_t (eps_t v_t), or backwards G = a_t (G + q_t dy_t); x is v, or do.
    """
    i_p = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    i_v, i_k, i_h, i_s = i_p % NV, i_p // NV % NK, (i_p // (NV * NK)) % H, i_p // (NV * NK * H)
    _, _, _, beg, end, used = locate_segment(i_s, cu_seqlens, T, N, L, IS_VARLEN)
    if not used:
        return

    o_k = i_k * BK + tl.arange(0, BK)
    o_v = tl.max_contiguous(i_v * BV + tl.arange(0, BV), 1)[None, :]
    m_v = o_v < V
    n_t = (end - beg).to(tl.int32)
    # the first token to visit, and the step to the next
    i_t = tl.maximum(end - 1, beg) if REVERSE else beg
    STEP: tl.constexpr = -1 if REVERSE else 1
    S_B: tl.constexpr = H if SCALAR_BETA else H * V
    NONE: tl.constexpr = no_step(OPTIONS)
    # a row that exists, for segments without tokens too
    p_r = rows + (i_h.to(tl.int64) * TT + tl.minimum(i_t, TT - 1)) * R
    p_x = x + (i_t * S_X + i_h * V) + o_v
    p_beta = beta + (i_t * H + i_h) + o_v * 0 if SCALAR_BETA else beta + (i_t * H + i_h) * V + o_v
    p_z = z + (i_t * S_Z + i_h * V) + o_v if HAS_Z else p_x
    p_g = (g + (i_t * S_G + i_h) + o_v * 0 if SCALAR_G else g + (i_t * S_G + i_h * V) + o_v) if HAS_G else p_x
    # [BK, BV]
    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    b_a = tl.full([BK, BV], 1., dtype=tl.float32)
    # prefetch the inputs, which are in no cache, a block ahead; the last iteration reloads its own block
    n_b = n_t // 4
    xs = load_four(p_x, 4 * n_b, m_v, STEP * S_X, 0.)
    betas = load_four(p_beta, 4 * n_b, m_v, STEP * S_B, NONE)
    zs = load_four(p_z, 4 * n_b, m_v, STEP * S_Z, 0.) if HAS_Z else xs
    gs = load_four(p_g, 4 * n_b, m_v, STEP * S_G, 0.) if HAS_G else xs
    b_keys, b_squares, ns = load_tiles(p_r, i_k, tl.maximum(tl.minimum(n_t, 4), 1), STEP * R, KP, BK, REVERSE)
    for i in range(0, n_b):
        m = m_v if MASKED else None
        step = tl.where(i + 1 < n_b, 4 * STEP, 0)
        p_x, p_beta, p_z, p_g = p_x + step * S_X, p_beta + step * S_B, p_z + step * S_Z, p_g + step * S_G
        next_xs = load_next(p_x, m, STEP * S_X, 0.)
        next_betas = load_next(p_beta, m, STEP * S_B, NONE)
        next_zs = load_next(p_z, m, STEP * S_Z, 0.) if HAS_Z else next_xs
        next_gs = load_next(p_g, m, STEP * S_G, 0.) if HAS_G else next_xs
        p_r += step * R
        next_keys, next_squares, next_ns = load_tiles(p_r, i_k, 4, STEP * R, KP, BK, REVERSE)
        ks, squares = unstack(b_keys), unstack(b_squares)
        for u in tl.static_range(4):
            b_h, b_a = segment_token(
                b_h, b_a, ks[u], squares[u], ns[u], from_word(xs[u], x.dtype.element_ty),
                from_word(betas[u], beta.dtype.element_ty), from_word(zs[u], z.dtype.element_ty) if HAS_Z else None,
                from_word(gs[u], g.dtype.element_ty) if HAS_G else None, REVERSE, OPTIONS,
            )
        xs, betas, zs, gs = next_xs, next_betas, next_zs, next_gs
        b_keys, b_squares, ns = next_keys, next_squares, next_ns
    if n_b > 0:
        p_x, p_beta, p_z, p_r = p_x + 4 * STEP * S_X, p_beta + 4 * STEP * S_B, p_z + 4 * STEP * S_Z, p_r + 4 * STEP * R
        p_g += 4 * STEP * S_G
    for _ in range(4 * n_b, n_t):
        b_x, b_beta = load_masked(p_x, m_v, True), tl.load(p_beta, mask=m_v, other=NONE).to(tl.float32)
        b_z = load_masked(p_z, m_v, True) if HAS_Z else None
        b_g = load_masked(p_g, m_v, True) if HAS_G else None
        b_k = tl.load(p_r + (KP if REVERSE else 0) + o_k)[:, None]
        b_square = tl.load(p_r + 2 * KP + 4 + o_k)[:, None] if REVERSE else b_k
        b_h, b_a = segment_token(b_h, b_a, b_k, b_square, tl.load(p_r + 2 * KP), b_x, b_beta, b_z, b_g, REVERSE, OPTIONS)
        p_r, p_x, p_beta, p_z = p_r + STEP * R, p_x + STEP * S_X, p_beta + STEP * S_B, p_z + STEP * S_Z
        p_g += STEP * S_G
    o_k = o_k[:, None]
    o_h = (i_s.to(tl.int64) * H + i_h) * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
    tl.store(local + o_h, b_h, mask=(o_k < K) & m_v)
    tl.store(decay + o_h, b_a, mask=(o_k < K) & m_v)


@triton.heuristics(given(IS_VARLEN='cu_seqlens', USE_START='start'))
@triton.jit(do_not_specialize=['T', 'L'])
def longhorn_combine_kernel(
    decay, local, start, bounds, cu_seqlens, T, L, state_indices, final_state_indices, has_initial_state, pad_slot_id, s_h,
    H: tl.constexpr, KV: tl.constexpr, BS: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr,
    USE_START: tl.constexpr, POOLED: tl.constexpr,
):
    """Write the state that enters each segment of a sequence: x = start, then x = decay x + local, segment by segment.

    With POOLED, `start` is a pool whose rows are given by the indices.
    """
    i_p = tl.program_id(0)
    NS: tl.constexpr = (KV + BS - 1) // BS
    i_e, i_h, i_n = i_p % NS, (i_p // NS) % H, i_p // (NS * H)
    if IS_VARLEN:
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    else:
        bos = i_n.to(tl.int64) * T
        eos = bos + T
    i_s = first_slot(bos, i_n, T, L, IS_VARLEN)
    n_s = tl.maximum(tl.cdiv(eos - bos, L), 1).to(tl.int32)
    o_e = i_e * BS + tl.arange(0, BS)
    m_e = o_e < KV
    i_r, m_r = i_n.to(tl.int64), m_e
    if POOLED:
        i_r, _, read, _, _ = locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        m_r = only_if(read, m_e)
    if USE_START:
        b_x = tl.load(start + i_r * s_h + i_h * KV + o_e, mask=m_r, other=0.)
    else:
        b_x = tl.zeros([BS], dtype=tl.float32)
    for i in range(0, n_s):
        i_l = i_s + (n_s - 1 - i if REVERSE else i)
        p_e = (i_l * H + i_h) * KV + o_e
        tl.store(bounds + p_e, b_x, mask=m_e)
        b_x = tl.load(decay + p_e, mask=m_e, other=0.) * b_x + tl.load(local + p_e, mask=m_e, other=0.)


def summarize_segments(
    rows: torch.Tensor, args: Arguments, do: torch.Tensor | None = None, *, L: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(decay, local), each float32 `[S, H, K, V]`, of segments of L tokens; with `do`, of the state's gradient, in reverse.

    For that, rows hold the keys' squares.
    """
    (B, T, H, V), K, is_varlen = args.v.shape, args.k.shape[-1], args.cu_seqlens is not None
    args, strides = strided_inputs(args, ('g',))
    beta, g, (x, s_x) = args.beta, args.g, with_token_stride(args.v if do is None else do)
    z, s_z = (None, 0) if args.z is None or do is None else with_token_stride(args.z)
    N = args.cu_seqlens.shape[0] - 1 if args.cu_seqlens is not None else B
    S = num_checkpoints(B, T, N, L, is_varlen)
    decay, local = (x.new_empty((S, *args.state_shape[1:]), dtype=torch.float32) for _ in range(2))
    kernel, config = longhorn_segment_kernel, for_segments(launch_key(args))
    grid = (S * H * triton.cdiv(K, config.BK) * triton.cdiv(V, config.BV),)
    kernel[grid](
        rows, x, beta, z, g, decay, local, args.cu_seqlens, T, B * T, N, L, H=H, K=K, V=V, S_X=s_x, S_Z=s_z,
        S_G=strides['S_G'], R=rows.shape[-1], KP=padded_state_size(K), REVERSE=do is not None, OPTIONS=args.step_options,
        SCALAR_BETA=beta.dim() == 3, SCALAR_G=is_scalar(g), STATE_V_FIRST=args.state_v_first,
        **config.of(kernel), **FUSED,
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
    kernel, config, (_, T, H, K, V) = longhorn_combine_kernel, for_combine(launch_key(args)), args.sizes
    KV = K * V
    kernel[(args.num_sequences * H * triton.cdiv(KV, config.BS),)](
        decay, local, start, bounds, args.cu_seqlens, T, L, H=H, KV=KV, REVERSE=reverse, **config.of(kernel),
        **row_arguments(pool, H * KV), **FUSED,
    )
    return bounds
