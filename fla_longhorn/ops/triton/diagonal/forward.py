"""Forward kernel of the diagonal update: one pass over the tokens of a segment."""

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
    sigmoid,
    step_sizes,
    strided_inputs,
    weighted_rows,
)
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.common import (
    load_masked,
    locate_segment,
    prepare_rows,
    state_offsets,
    unpack_pairs,
    unstack,
    update,
)
from fla_longhorn.ops.triton.diagonal.configs import DiagonalConfig, for_forward
from fla_longhorn.ops.triton.slots import first_slot, has_spare_slot, locate_states, only_if, row_arguments


@triton.jit
def load_words(p, m_v, m_t, BV: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr, GUARDED: tl.constexpr):
    """A value of each channel as stored, `[1, BV]`, or with PAIRS words of two; GUARDED: zeros unless `m_t`."""
    if PAIRS:
        o_p = tl.arange(0, BV // 2)[None, :]
        p_w = p.to(tl.pointer_type(tl.int32), bitcast=True) + o_p
        return tl.load(p_w, mask=(o_p >= 0) & m_t, other=0) if GUARDED else tl.load(p_w)
    else:
        m = m_v & m_t if GUARDED else m_v
        return tl.load(p, mask=m, other=0.) if MASKED or GUARDED else tl.load(p)


@triton.jit
def to_float(b_x, PAIRS: tl.constexpr):
    """Float32 `[1, BV]` of what :func:`load_words` gives."""
    return unpack_pairs(b_x) if PAIRS else b_x.to(tl.float32)


@triton.jit
def load_rows(p_r, n_u, R: tl.constexpr, BK: tl.constexpr, U: tl.constexpr, GUARDED: tl.constexpr):
    """Keys and queries `[2 BK, U]` of U tokens, and a tuple of their |k|^2."""
    o_u = tl.arange(0, U)[None, :]
    p_k = p_r + o_u * R + tl.arange(0, 2 * BK)[:, None]
    ns = ()
    for u in tl.static_range(U):
        ns = ns + (load_masked(p_r + u * R + 2 * BK, n_u > u, GUARDED),)
    return load_masked(p_k, o_u < n_u, GUARDED), ns


@triton.jit
def keys_and_queries(b_rows):
    """Tuples of the keys and of the queries, each `[BK, 1]`, of the tile that :func:`load_rows` gives."""
    ks, qs = (), ()
    BK: tl.constexpr = b_rows.shape[0] // 2
    rows = unstack(b_rows)
    for u in tl.static_range(len(rows)):
        b_k, b_q = tl.split(tl.permute(tl.reshape(rows[u], (2, BK, 1)), (1, 2, 0)))
        ks, qs = ks + (b_k,), qs + (b_q,)
    return ks, qs


@triton.jit
def load_inputs(
    p_v, p_beta, p_z, p_g, o_x, m_v, n_u, S_V: tl.constexpr, S_B: tl.constexpr, S_Z: tl.constexpr, S_G: tl.constexpr,
    BV: tl.constexpr, U: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr,
    SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr, GUARDED: tl.constexpr,
):
    """v, beta, z and g of U tokens, of which with GUARDED only the first n_u exist."""
    o_p = 0 if PAIRS else o_x
    vs, betas, zs, gs = (), (), (), ()
    for u in tl.static_range(U):
        m_t = tl.full([1, 1], u, tl.int32) < n_u
        vs = vs + (load_words(p_v + u * S_V + o_p, m_v, m_t, BV, PAIRS, MASKED, GUARDED),)
        if SCALAR_BETA:
            betas = betas + (load_masked(p_beta + u * S_B, n_u > u, GUARDED),)
        else:
            betas = betas + (load_words(p_beta + u * S_B + o_p, m_v, m_t, BV, PAIRS, MASKED, GUARDED),)
        zs = zs + (load_words(p_z + u * S_Z + o_p, m_v, m_t, BV, PAIRS, MASKED, GUARDED) if HAS_Z else 0.,)
        # g has a dtype of its own, so it is never loaded in pairs of 16 bits
        if HAS_G:
            if SCALAR_G:
                gs = gs + (load_masked(p_g + u * S_G, n_u > u, GUARDED),)
            else:
                gs = gs + (load_words(p_g + u * S_G + o_x, m_v, m_t, BV, False, MASKED, GUARDED),)
        else:
            gs = gs + (0.,)
    return vs, betas, zs, gs


@triton.jit
def forward_token(
    b_h, b_k, b_q, b_n, b_v, b_beta, b_z, b_g, b_D, PAIRS: tl.constexpr, ROWS: tl.constexpr, OPTIONS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """The state after one token and its output `(q^T S + D v) silu(z)`."""
    # [1, BV]
    b_v = to_float(b_v, PAIRS)
    b_beta = b_beta.to(tl.float32) + tl.zeros_like(b_v) if SCALAR_BETA else to_float(b_beta, PAIRS)
    if HAS_G:
        b_h *= decays(b_g)
    b_h = update(b_h, b_k, step_sizes(b_beta, b_n, OPTIONS), b_v)
    b_o = weighted_rows(b_q, b_h, ROWS)
    if HAS_D:
        b_o += b_D * b_v
    if HAS_Z:
        b_z = to_float(b_z, PAIRS)
        b_o *= b_z * sigmoid(b_z)
    return b_h, b_o


@triton.heuristics({'MASKED': lambda args: args['V'] % args['BV'] != 0, **given(
    IS_VARLEN='cu_seqlens', USE_INITIAL_STATE='h0', STORE_FINAL_STATE='ht', SAVE_STATES='states', HAS_D='D', HAS_Z='z',
    HAS_G='g',
)})
@triton.jit(do_not_specialize=['T', 'TT', 'N', 'L', 'INTERVAL'])
def longhorn_fwd_kernel(
    rows, v, beta, D, z, g, o, h0, ht, states, cu_seqlens, T, TT, N, L, INTERVAL, state_indices, final_state_indices,
    has_initial_state, pad_slot_id, s_h, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S_V: tl.constexpr,
    S_Z: tl.constexpr, S_G: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
    U: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr, STATE_V_FIRST: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, SAVE_STATES: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_G: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr, CUT: tl.constexpr,
):
    """o_t = (q_t^T S_t + D v_t) silu(z_t) along one segment, for BV channels of a head; a thread has BC of them.

    A decay e^g multiplies the state before each step.
    `h0` holds the state at the start of each segment slot; checkpoints are written to `states`. With POOLED, `ht`
    is a pool whose rows are given by the indices, and so is `h0` unless sequences are CUT into segments.
    """
    i_p = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_s = i_p % NV, (i_p // NV) % H, i_p // (NV * H)
    i_n, bos, eos, beg, end, used = locate_segment(i_s, cu_seqlens, T, N, L, IS_VARLEN)
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
    o_x = tl.max_contiguous(tl.arange(0, BV), BC)[None, :]
    o_v = i_v * BV + o_x
    m_v = o_v < V
    m_h = (o_k < K) & m_v
    p_r = rows + (i_h.to(tl.int64) * TT + beg) * R
    p_v = v + (beg * S_V + i_h * V + i_v * BV)
    p_o = o + ((beg * H + i_h) * V + i_v * BV)
    p_beta = beta + beg * H + i_h if SCALAR_BETA else beta + ((beg * H + i_h) * V + i_v * BV)
    p_z = z + (beg * S_Z + i_h * V + i_v * BV) if HAS_Z else p_v
    p_g = g + (beg * S_G + (i_h if SCALAR_G else i_h * V + i_v * BV)) if HAS_G else p_v
    S_B: tl.constexpr = H if SCALAR_BETA else H * V
    # [1, BV]
    b_D = tl.load(D + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32) if HAS_D else 0.
    # [BK, BV]
    o_h = i_h * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
    m_r, m_w, s_r = m_h, m_h, H * K * V
    if POOLED:
        m_w = only_if(written, m_h)
        if not CUT:
            i_r, m_r, s_r = first, only_if(read, m_h), s_h
    if USE_INITIAL_STATE:
        b_h = tl.load(h0 + i_r * s_r + o_h, mask=m_r, other=0.)
    else:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    i_c = (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) + (beg - bos) // INTERVAL) * H + i_h

    n_t = (end - beg).to(tl.int32)
    n_b = n_t // U
    # the compiler moves no load above a store: inputs are prefetched a block ahead, and outputs stored at its end
    vs, betas, zs, gs = load_inputs(
        p_v, p_beta, p_z, p_g, o_x, m_v, n_b * U, S_V, S_B, S_Z, S_G, BV, U, PAIRS, MASKED, HAS_Z, HAS_G, SCALAR_BETA,
        SCALAR_G, True,
    )
    b_rows, ns = load_rows(p_r, n_b * U, R, BK, U, True)
    for i_t in range(0, n_t, INTERVAL):
        if SAVE_STATES:
            tl.store(states + i_c * K * V + o_k * V + o_v, b_h, mask=m_h)
            i_c += H
        for i_b in range(i_t // U, tl.minimum(i_t + INTERVAL, n_t) // U):
            # the last iteration reloads its own block, so the prefetch needs no bounds check
            step = tl.where(i_b + 1 < n_b, U, 0)
            p_v, p_beta, p_z, p_g = p_v + step * S_V, p_beta + step * S_B, p_z + step * S_Z, p_g + step * S_G
            next_vs, next_betas, next_zs, next_gs = load_inputs(
                p_v, p_beta, p_z, p_g, o_x, m_v, U, S_V, S_B, S_Z, S_G, BV, U, PAIRS, MASKED, HAS_Z, HAS_G, SCALAR_BETA,
                SCALAR_G, False,
            )
            p_r += step * R
            next_rows, next_ns = load_rows(p_r, U, R, BK, U, False)
            ks, qs = keys_and_queries(b_rows)
            outputs = ()
            for u in tl.static_range(U):
                b_h, b_o = forward_token(
                    b_h, ks[u], qs[u], ns[u], vs[u], betas[u], zs[u], gs[u], b_D, PAIRS, ROWS, OPTIONS,
                    HAS_D, HAS_Z, HAS_G, SCALAR_BETA,
                )
                outputs = outputs + (b_o,)
            for u in tl.static_range(U):
                tl.store(p_o + u * H * V + o_x, outputs[u].to(p_o.dtype.element_ty), mask=m_v if MASKED else None)
            vs, betas, zs, gs, b_rows, ns = next_vs, next_betas, next_zs, next_gs, next_rows, next_ns
            p_o += U * H * V
    n_u = n_t - n_b * U
    if n_u > 0:
        if n_b > 0:
            p_r, p_v, p_beta = p_r + U * R, p_v + U * S_V, p_beta + U * S_B
            p_z, p_g = p_z + U * S_Z, p_g + U * S_G
        vs, betas, zs, gs = load_inputs(
            p_v, p_beta, p_z, p_g, o_x, m_v, n_u, S_V, S_B, S_Z, S_G, BV, U, PAIRS, MASKED, HAS_Z, HAS_G, SCALAR_BETA,
            SCALAR_G, True,
        )
        # past the end the key and g are zero and the state does not change
        b_rows, ns = load_rows(p_r, n_u, R, BK, U, True)
        ks, qs = keys_and_queries(b_rows)
        for u in tl.static_range(U):
            b_h, b_o = forward_token(
                b_h, ks[u], qs[u], ns[u], vs[u], betas[u], zs[u], gs[u], b_D, PAIRS, ROWS, OPTIONS,
                HAS_D, HAS_Z, HAS_G, SCALAR_BETA,
            )
            tl.store(p_o + u * H * V + o_x, b_o.to(p_o.dtype.element_ty), mask=m_v & (tl.full([1, 1], u, tl.int32) < n_u))
    if SAVE_STATES and IS_VARLEN:
        m_s = only_if((end == eos) & has_spare_slot(bos, eos, INTERVAL), m_h)
        tl.store(states + i_c * K * V + o_k * V + o_v, tl.zeros([BK, BV], dtype=tl.float32), mask=m_s)
    if STORE_FINAL_STATE:
        if end == eos:
            tl.store(ht + i_w * s_h + o_h, b_h, mask=m_w)


def loads_pairs(args: Arguments, strides: dict[str, int], config: DiagonalConfig) -> bool:
    """Whether v, beta and z can be loaded as words of two bfloat16 values."""
    v, beta, z = args.v, args.beta, args.z
    return (
        config.BC == 2 and v.shape[-1] % config.BV == 0 and strides['S_V'] % 2 == 0 and strides['S_Z'] % 2 == 0
        and beta.dim() == 4
        and all(x.dtype == torch.bfloat16 and x.data_ptr() % 4 == 0 for x in (v, beta, z) if x is not None)
    )


def longhorn_diagonal_fwd(
    args: Arguments, ht: torch.Tensor | None, states: torch.Tensor | None, pool: Pool | None, *, parallel: bool,
) -> torch.Tensor:
    """Return `o`; write the final state to `ht` and the states for backward to `states`, where given."""
    args, strides = strided_inputs(args, ('v', 'z', 'g'))
    B, T, H, K, V = args.sizes
    N, v, beta, g, cu_seqlens = args.num_sequences, args.v, args.beta, args.g, args.cu_seqlens
    kernel, config = longhorn_fwd_kernel, for_forward(launch_key(args))
    rows, L = prepare_rows(args, squares=False), segments.segment_length(args, parallel, config.BV)
    h0 = args.initial_state if pool is None else pool.states
    if L <= T:
        decay, local = segments.summarize_segments(rows, args, L=L)
        h0 = segments.combine_segments(decay, local, h0, args, L=L, reverse=False, pool=pool)
    # programs of a sequence without a row return at once
    o = (torch.empty if pool is None else torch.zeros)(B, T, H, V, dtype=v.dtype, device=v.device)
    grid = (num_checkpoints(B, T, N, L, cu_seqlens is not None) * H * triton.cdiv(V, config.BV),)
    kernel[grid](
        rows, v, beta, args.D, args.z, g, o, h0, ht, states, cu_seqlens, T, B * T, N, L, checkpoint_interval(K), H=H, K=K, V=V,
        **strides, R=rows.shape[-1], OPTIONS=args.step_options, SCALAR_BETA=beta.dim() == 3,
        SCALAR_G=is_scalar(g), STATE_V_FIRST=args.state_v_first, PAIRS=loads_pairs(args, strides, config),
        CUT=L <= T, **config.of(kernel),
        **row_arguments(pool, H * K * V), **FUSED,
    )
    return o
