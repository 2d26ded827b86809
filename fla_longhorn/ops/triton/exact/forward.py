"""Exact update, chunkwise forward: matrix products and one forward substitution per chunk of 16 tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.exact.common import (
    CHUNK_SIZE,
    add_updates,
    chunk_tile,
    first_slot,
    forward_substitution,
    head_and_index,
    kept,
    load_rows,
    operand_precision,
    product,
    rounded,
    sequence_range,
    sigmoid,
    state_mask,
    state_offsets,
    step_sizes,
    tile_mask,
)
from fla_longhorn.ops.triton.exact.gram import chunk_longhorn_exact_gram


def forward_tile(K: int, precision: str) -> dict:
    """Launch parameters."""
    return {**chunk_tile(K, precision), 'PREFETCH': K <= 64}


@triton.jit
def chunk_update(
    b_h, b_p, b_v, b_b, b_q, b_k, p_g, p_a, DOT: tl.constexpr, USE_BETA_SIGMOID: tl.constexpr, LATE: tl.constexpr,
):
    """Residuals by substitution, then the state at the chunk's end `[BV, BK]` and `O^T [BV, BT]`.

    `LATE`: Q S not before the substitution, which needs the registers.
    """
    BT: tl.constexpr = b_v.shape[0]
    # [BT]
    b_n = tl.load(p_g + BT * BT + tl.arange(0, BT))
    # [BT, BV]
    b_e = tl.broadcast_to(step_sizes(b_b, b_n[:, None], USE_BETA_SIGMOID), b_v.shape)
    b_o = tl.zeros([b_h.shape[0], BT], dtype=tl.float32)
    if not LATE:
        b_o = product(b_h, tl.trans(b_q), b_o, DOT)
    b_u = forward_substitution(b_v - tl.trans(b_p), b_e, p_g, BT, DOT, True) * b_e
    if DOT == 'tf32':
        # as the substitution took it
        b_u = kept(b_u, DOT)
    if LATE:
        b_o = product(b_h, tl.trans(b_q), b_o, DOT)
    return add_updates(b_h, b_o, b_u, b_k, p_a, DOT, False, True)


@triton.jit
def store_output(
    p_o, b_o, p_v, b_D, p_z, m_v, scale, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_SCALE: tl.constexpr,
):
    """`(scale * O + D * V) * silu(Z)`, from `O^T`; v is loaded again, for registers don't hold it so long."""
    if HAS_SCALE:
        b_o *= scale
    if HAS_D or HAS_Z:
        # [BT, BV]
        b_y = tl.trans(b_o)
        if HAS_D:
            b_y += b_D[None, :] * tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
        if HAS_Z:
            b_z = tl.load(p_z, mask=m_v, other=0.0).to(tl.float32)
            b_y *= b_z * sigmoid(b_z)
        tl.store(p_o, rounded(b_y, p_o.dtype.element_ty), mask=m_v)
    else:
        tl.store(p_o, tl.trans(rounded(b_o, p_o.dtype.element_ty)), mask=m_v)


@triton.heuristics({
    'HAS_D': lambda args: args['D'] is not None,
    'HAS_Z': lambda args: args['z'] is not None,
    'HAS_SCALE': lambda args: args['scale'] != 1.0,
    'USE_INITIAL_STATE': lambda args: args['h0'] is not None,
    'STORE_FINAL_STATE': lambda args: args['ht'] is not None,
    'SAVE_STATES': lambda args: args['states'] is not None,
    'IS_VARLEN': lambda args: args['cu_seqlens'] is not None,
    'A_PARTS': lambda args: 1 if args['DOT'] == 'ieee' else 2,
})
@triton.jit(do_not_specialize=['T'])
def chunk_longhorn_exact_fwd_kernel_o(
    q,
    k,
    v,
    beta,
    D,
    z,
    g,
    a,
    h0,
    o,
    ht,
    states,
    cu_seqlens,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    INTERVAL: tl.constexpr,
    DOT: tl.constexpr,
    PREFETCH: tl.constexpr,
    A_PARTS: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    SAVE_STATES: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    r"""One block of channels of one sequence, chunk by chunk, the state `[BV, BK]` in registers.

    With `E` the step sizes, `G = K K^T`, `A = tril(Q K^T)` and `S` the state at the chunk's start:

    .. math::
        R = V - K S - \mathrm{tril}_{<}(G)\,U, \quad U = E \odot R, \quad O = Q S + A U, \quad S \leftarrow S + K^\top U

    (Theorem 3.1 of arXiv 2407.14207 unrolled over a chunk, as DeltaNet's chunkwise form with a step per channel.)
    State and `U^T` are the first operands of the products, and a thread owns whole columns of `[BT, BV]`: then the
    substitution is pure FMA.
    """
    i_h, i_n = head_and_index(H)
    i_v = tl.program_id(1)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    # what a thread may load at once decides which columns it owns
    o_v = tl.multiple_of(i_v * BV + tl.arange(0, BV), VEC)
    m_h = state_mask(o_k, o_v, K, V, BV)

    i_g = first_slot(bos, i_n, T, BT, IS_VARLEN) * H + i_h
    i_x = bos * H + i_h
    b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32) if HAS_D else None
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    # int64, so that a row's offset is a constant of the load
    o_x = o_t[:, None].to(tl.int64) * (H * V) + o_v[None, :]
    o_b = o_t[:, None] * H if SCALAR_BETA else o_x
    if SAVE_STATES:
        p_s = states + (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) * H + i_h) * (K * V)

    # [BV, BK]
    if USE_INITIAL_STATE:
        p_h0 = h0 + (i_n.to(tl.int64) * H + i_h) * (K * V) + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
        b_h = tl.load(p_h0, mask=m_h, other=0.0)
    else:
        b_h = tl.zeros([BV, BK], dtype=tl.float32)

    b_zero = tl.zeros([BV, BT], dtype=tl.float32)
    NT = T_n // BT
    LATE: tl.constexpr = BK > 16 and (HAS_D or HAS_Z)
    BB: tl.constexpr = 1 if SCALAR_BETA else BV
    VB: tl.constexpr = 1 if SCALAR_BETA else V
    if PREFETCH:
        # v and beta of full chunks are loaded one ahead: [BT, BV]
        b_v_next = tl.load(v + i_x * V + o_x, mask=tile_mask(o_t, o_v, NT, V, BV, False), other=0.0)
        b_b_next = tl.load(beta + i_x * VB + o_b, mask=tile_mask(o_t, o_v, NT, V, BB, False), other=0.0)
    for i_s in range(tl.cdiv(T_n, INTERVAL)):
        if SAVE_STATES:
            # [V, K], as the registers hold it
            tl.store(p_s + state_offsets(o_k, o_v, K, V, True), b_h, mask=m_h)
            p_s += H * K * V
        for i_t in tl.range(i_s * (INTERVAL // BT), tl.minimum((i_s + 1) * (INTERVAL // BT), NT), num_stages=1):
            # [BT, BK]
            m_k = tile_mask(o_t, o_k, BT, K, BK, False)
            b_q = tl.load(q + i_x * K + o_qk, mask=m_k, other=0.0)
            b_k = tl.load(k + i_x * K + o_qk, mask=m_k, other=0.0)
            b_p = product(b_h, tl.trans(b_k), b_zero, DOT)
            # loads placed after the products keep the layout in which a thread owns columns
            m_v = tile_mask(o_t, o_v, BT, V, BV, False)
            if PREFETCH:
                b_v, b_b = b_v_next.to(tl.float32), b_b_next.to(tl.float32)
                left = NT - 1 - i_t
                i_next = i_x + BT * H
                b_v_next = tl.load(v + i_next * V + o_x, mask=tile_mask(o_t, o_v, left, V, BV, False), other=0.0)
                b_b_next = tl.load(beta + i_next * VB + o_b, mask=tile_mask(o_t, o_v, left, V, BB, False), other=0.0)
            else:
                b_v = tl.load(v + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
                b_b = load_rows(beta, i_x, V, o_b, o_t, BT, m_v, SCALAR_BETA)
            b_h, b_o = chunk_update(
                b_h, b_p, b_v, b_b, b_q, b_k, g + i_g * ((BT + 1) * BT), a + i_g * (A_PARTS * BT * BT), DOT, USE_BETA_SIGMOID,
                LATE,
            )
            store_output(
                o + i_x * V + o_x, b_o, v + i_x * V + o_x, b_D, z + i_x * V + o_x if HAS_Z else None, m_v, scale, HAS_D, HAS_Z,
                HAS_SCALE,
            )
            i_x += BT * H
            i_g += H
    # the tokens after the last full chunk
    left = T_n - NT * BT
    if left > 0:
        m_k = tile_mask(o_t, o_k, left, K, BK, True)
        m_v = tile_mask(o_t, o_v, left, V, BV, True)
        b_q = tl.load(q + i_x * K + o_qk, mask=m_k, other=0.0)
        b_k = tl.load(k + i_x * K + o_qk, mask=m_k, other=0.0)
        b_p = product(b_h, tl.trans(b_k), b_zero, DOT)
        b_v = tl.load(v + i_x * V + o_x, mask=m_v, other=0.0).to(tl.float32)
        b_b = load_rows(beta, i_x, V, o_b, o_t, left, m_v, SCALAR_BETA)
        b_h, b_o = chunk_update(
            b_h, b_p, b_v, b_b, b_q, b_k, g + i_g * ((BT + 1) * BT), a + i_g * (A_PARTS * BT * BT), DOT, USE_BETA_SIGMOID,
            LATE,
        )
        store_output(
            o + i_x * V + o_x, b_o, v + i_x * V + o_x, b_D, z + i_x * V + o_x if HAS_Z else None, m_v, scale, HAS_D, HAS_Z,
            HAS_SCALE,
        )

    if STORE_FINAL_STATE:
        p_ht = ht + (i_n.to(tl.int64) * H + i_h) * (K * V) + state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
        tl.store(p_ht, b_h, mask=m_h)


def chunk_longhorn_exact_fwd(args: Arguments, ht: torch.Tensor | None, states: torch.Tensor | None) -> torch.Tensor:
    """Return `o`; write the final state to `ht` and the states for backward to `states`, where given. `args` is contiguous."""
    _, T, H, K, V = args.sizes
    precision = operand_precision(args.q, args.k, args.v)
    g, a = chunk_longhorn_exact_gram(args.q, args.k, args.cu_seqlens, precision)
    o = torch.empty_like(args.v)
    tile = forward_tile(K, precision)
    chunk_longhorn_exact_fwd_kernel_o[(H * args.num_sequences, triton.cdiv(V, tile['BV']))](
        args.q, args.k, args.v, args.beta, args.D, args.z, g, a, args.initial_state, o, ht, states, args.cu_seqlens,
        args.scale, T, H=H, K=K, V=V, BT=CHUNK_SIZE, INTERVAL=checkpoint_interval(K), DOT=precision,
        USE_BETA_SIGMOID=args.use_beta_sigmoid_in_kernel, SCALAR_BETA=args.beta.dim() == 3,
        STATE_V_FIRST=args.state_v_first, **tile,
    )
    return o
