"""Exact update, chunkwise forward: matrix products and one forward substitution for each chunk of 16 tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import FUSED, given, is_scalar, launch_key, sigmoid, step_sizes, strided_inputs
from fla_longhorn.ops.triton.exact.common import (
    chunk_decays,
    chunk_offsets,
    decayed,
    decayed_reads,
    decayed_substitution,
    forward_substitution,
    gram_pointers,
    gram_rows,
    head_index_and_channels,
    is_split,
    kept,
    load_tile,
    product,
    products_after,
    rounded,
    tile_mask,
    tile_offsets,
)
from fla_longhorn.ops.triton.exact.configs import for_forward, for_states
from fla_longhorn.ops.triton.exact.gram import chunk_longhorn_exact_gram
from fla_longhorn.ops.triton.exact.state import add_updates, load_slice, load_state, store_state, zero_state
from fla_longhorn.ops.triton.slots import first_slot, has_spare_slot, locate_slot, locate_states, row_arguments, sequence_range


@triton.jit
def gated_output(b_o, b_D, b_v, b_z, scale, dtype: tl.constexpr):
    """`(scale * O + D * V) * silu(Z)` `[BT, BV]`, rounded to `dtype`, given `O^T`; scale, D and Z may be None."""
    if scale is not None:
        b_o *= scale
    if b_D is None and b_z is None:
        return tl.trans(rounded(b_o, dtype))
    else:
        # [BT, BV]
        b_y = tl.trans(b_o)
        if b_D is not None:
            b_y += b_D[None, :] * b_v.to(tl.float32)
        if b_z is not None:
            b_z = b_z.to(tl.float32)
            b_y *= b_z * sigmoid(b_z)
        return rounded(b_y, dtype)


@triton.jit
def chunk_updates(b_p, b_v, b_e, rows, p_gram, DOT: tl.constexpr, ROWS: tl.constexpr):
    """U of one chunk `[BT, BV]`, given its step sizes and `(K S)^T` at its start in `b_p`.

    Inlined by hand, its constants would come in another order, and ptxas would schedule the kernel worse.
    """
    b_u = forward_substitution(b_v - tl.trans(b_p), b_e, rows, p_gram, b_v.shape[0], DOT, True, ROWS) * b_e
    if DOT == 'tf32':
        # the substitution used these digits of U
        b_u = kept(b_u, DOT)
    return b_u


@triton.jit
def forward_chunk(
    b_h, b_q, b_k, b_v, b_b, b_z, b_g, b_D, tensors, strides, offsets, i_x, i_gram, left, left_next, scale, K: tl.constexpr,
    V: tl.constexpr, DOT: tl.constexpr, OPTIONS: tl.constexpr, PREFETCH: tl.constexpr, RELOAD: tl.constexpr,
    ROWS: tl.constexpr, OUTPUT: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Store the output of one chunk, with `OUTPUT`; return its final state, in slices, and the next chunk's tiles.

    With `PREFETCH`, this chunk's tiles of q, k, v, beta, z and g are arguments, and the next chunk's are loaded before the
    output is stored, because loads do not move across stores. Without it they are loaded here. With `RELOAD`, k is loaded
    twice instead of being held during the substitution. Without z, `b_z` is b_v, and so is `b_g` without a g per
    channel.
    """
    q, k, v, beta, z, g, gram, a, o = tensors
    S_Q, S_K, S_V, S_B, S_Z, S_G, S_O = strides
    o_t, o_k, o_v, o_b, o_g, x_q, x_k, x_v, x_b, x_z, x_g, x_o = offsets
    BT: tl.constexpr = o_t.shape[0]
    BS: tl.constexpr = o_k.shape[0]
    SLICES: tl.constexpr = len(b_h)
    BV: tl.constexpr = o_v.shape[0]
    SCALAR_G: tl.constexpr = o_g.shape[0] == 1
    # Q S after the substitution, which needs the registers; not with several slices, whose rounded state would take more
    LATE: tl.constexpr = SLICES == 1 and BS > 16 and (b_D is not None or z is not None)
    AGAIN: tl.constexpr = RELOAD and not PREFETCH and (LATE or SLICES > 1)
    i_next = i_x + BT
    p_q, p_k = q + i_x * S_Q + x_q, k + i_x * S_K + x_k
    p_gram, p_a = gram_pointers(gram, a, i_gram, BT, DOT, g is not None)
    rows = gram_rows(p_gram, ROWS, BT, False)
    b_p, b_o = tl.zeros([BV, BT], dtype=tl.float32), tl.zeros([BV, BT], dtype=tl.float32)
    b_ks = ()
    for s in tl.static_range(SLICES):
        b_k_s = b_k if PREFETCH else load_slice(p_k, o_t, o_k, s, left, K, PARTIAL)
        b_p = product(b_h[s], tl.trans(b_k_s), b_p, DOT)
        if SLICES > 1 and OUTPUT:
            b_q = load_slice(p_q, o_t, o_k, s, left, K, PARTIAL)
            b_o = product(b_h[s], tl.trans(b_q), b_o, DOT)
        b_ks = b_ks + (b_k_s,)
    if SLICES == 1 and not PREFETCH and not AGAIN:
        b_q = load_slice(p_q, o_t, o_k, 0, left, K, PARTIAL)
    # [BT, BV]; loaded after the products, they keep the layout in which a thread owns columns
    if PREFETCH:
        n_q = load_tile(q + i_next * S_Q + x_q, o_t, o_k, left_next, K, False)
        n_k = load_tile(k + i_next * S_K + x_k, o_t, o_k, left_next, K, False)
        n_v = load_tile(v + i_next * S_V + x_v, o_t, o_v, left_next, V, False)
        n_b = load_tile(beta + i_next * S_B + x_b, o_t, o_b, left_next, V, False)
        n_g = n_v if g is None or SCALAR_G else load_tile(g + i_next * S_G + x_g, o_t, o_g, left_next, V, False)
    else:
        b_v = load_tile(v + i_x * S_V + x_v, o_t, o_v, left, V, PARTIAL)
        b_b = load_tile(beta + i_x * S_B + x_b, o_t, o_b, left, V, PARTIAL)
        b_g = b_v if g is None or SCALAR_G else load_tile(g + i_x * S_G + x_g, o_t, o_g, left, V, PARTIAL)
        n_q, n_k, n_v, n_b, n_g = b_q, b_k, b_v, b_b, b_g
    # [BT]
    b_n = tl.load(p_gram + BT * BT + o_t)
    # [BT, BV]
    b_e = tl.broadcast_to(step_sizes(b_b.to(tl.float32), b_n[:, None], OPTIONS), b_v.shape)
    if SLICES == 1 and OUTPUT and not LATE:
        b_o = product(b_h[0], tl.trans(b_q), b_o, DOT)
    if g is None:
        b_u = chunk_updates(b_p, b_v.to(tl.float32), b_e, rows, p_gram, DOT, ROWS)
    else:
        b_d = chunk_decays(None if SCALAR_G else b_g, g + i_x * S_G, o_t, left, S_G, BV)
        b_u = decayed_substitution(tl.trans(b_p), b_v.to(tl.float32), b_e, b_d, p_gram, BT) * b_e
    if OUTPUT and LATE:
        if AGAIN:
            b_q = load_slice(p_q, o_t, o_k, 0, left, K, PARTIAL)
        b_o = product(b_h[0], tl.trans(b_q), b_o, DOT)
    if g is not None:
        if OUTPUT:
            b_o = tl.trans(decayed_reads(tl.trans(b_o), b_u, b_d, p_a, BT))
        b_after, b_total = products_after(b_d)
        b_h, b_u = decayed(b_h, b_total), b_u * b_after
    b_h, b_o = add_updates(
        b_h, b_o, b_u, None if AGAIN else b_ks, p_k, o_t, o_k, left, p_a, K, DOT, g is not None and DOT != 'ieee',
        OUTPUT and g is None, PARTIAL,
    )
    if AGAIN and SLICES > 1 and b_D is not None:
        b_v = load_tile(v + i_x * S_V + x_v, o_t, o_v, left, V, PARTIAL, True)
    if not OUTPUT:
        return b_h, n_q, n_k, n_v, n_b, b_z, n_g
    if z is None:
        b_y, n_z = gated_output(b_o, b_D, b_v, None, scale, o.dtype.element_ty), n_v
    elif PREFETCH:
        b_y = gated_output(b_o, b_D, b_v, b_z, scale, o.dtype.element_ty)
        # there are not enough registers to hold two tiles of z
        n_z = load_tile(z + i_next * S_Z + x_z, o_t, o_v, left_next, V, False)
    else:
        n_z = load_tile(z + i_x * S_Z + x_z, o_t, o_v, left, V, PARTIAL)
        b_y = gated_output(b_o, b_D, b_v, n_z, scale, o.dtype.element_ty)
    tl.store(o + i_x * S_O + x_o, b_y, mask=tile_mask(o_t, o_v, left, V, BV, PARTIAL))
    return b_h, n_q, n_k, n_v, n_b, n_z, n_g


@triton.heuristics({'HAS_SCALE': lambda args: args['scale'] != 1.0, **given(
    HAS_D='D', HAS_Z='z', HAS_G='g', USE_INITIAL_STATE='h0', STORE_FINAL_STATE='ht', SAVE_STATES='states',
    IS_VARLEN='cu_seqlens',
)})
@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_fwd_kernel_o(
    q, k, v, beta, D, z, g, gram, a, h0, o, ht, states, cu_seqlens, scale, T, N,
    state_indices, final_state_indices, has_initial_state, pad_slot_id, s_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S_Q: tl.constexpr, S_K: tl.constexpr, S_V: tl.constexpr,
    S_B: tl.constexpr, S_Z: tl.constexpr, S_G: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    BV: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr, INTERVAL: tl.constexpr, DOT: tl.constexpr,
    PREFETCH: tl.constexpr, RELOAD: tl.constexpr, ROWS: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr, STATE_V_FIRST: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr,
    HAS_SCALE: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, SAVE_STATES: tl.constexpr,
    IS_VARLEN: tl.constexpr, POOLED: tl.constexpr, OUTPUT: tl.constexpr, BY_INTERVAL: tl.constexpr,
):
    r"""The outputs of one block of channels of one sequence, chunk by chunk, with the state `[BV, BK]` in registers.

    With `E` the step sizes, `G = K K^T`, `A = tril(Q K^T)` and `S` the state at the chunk's start:

    .. math::
        R = V - K S - \mathrm{tril}_{<}(G)\,U, \quad U = E \odot R, \quad O = Q S + A U, \quad S \leftarrow S + K^\top U

    This is Theorem 3.1 of arXiv 2407.14207 unrolled over a chunk: DeltaNet's chunkwise form with a step size per channel.
    The state and `U^T` are the first operands of the products, and a thread owns whole columns of `[BT, BV]`, so that the
    substitution takes only FMA. With g, a token's decay multiplies the state before its step (`decayed_substitution`).

    With POOLED, `h0` and `ht` are a pool, with rows given by the indices; else row n is sequence n's. Without OUTPUT, only the
    states are computed. With BY_INTERVAL, a program computes one interval, from the state in `states`.
    """
    i_h, i_c, i_v = head_index_and_channels(H, V, BV)
    i_n = i_c
    if BY_INTERVAL:
        i_n, bos, T_n, t_0 = locate_slot(cu_seqlens, i_c, T, N, INTERVAL, IS_VARLEN)
        # an unused slot has no tokens
        T_n = tl.maximum(tl.minimum(T_n - t_0, INTERVAL), 0).to(tl.int32)
    i_r = i_n.to(tl.int64)
    i_w = i_r
    if POOLED:
        i_r, i_w, read, written, used = locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        if not used:
            return
    if BY_INTERVAL:
        i_gram = (first_slot(bos, i_n, T, BT, IS_VARLEN) + t_0 // BT) * H + i_h
        bos += t_0
    else:
        bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
        i_gram = first_slot(bos, i_n, T, BT, IS_VARLEN) * H + i_h
    offsets = chunk_offsets(i_v, BT, BS, BV, VEC, SCALAR_BETA, SCALAR_G)
    o_t, o_k, o_v, o_b, o_g = offsets
    SLICES: tl.constexpr = BK // BS
    i_x = bos
    b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32) if HAS_D else None
    q, k, v, o = q + i_h * K, k + i_h * K, v + i_h * V, o + i_h * V
    beta += i_h if SCALAR_BETA else i_h * V
    if HAS_Z:
        z += i_h * V
    if HAS_G:
        g += i_h if SCALAR_G else i_h * V
    tensors = (q, k, v, beta, z, g, gram, a, o)
    strides = (S_Q, S_K, S_V, S_B, S_Z, S_G, H * V)
    x_q, x_k, x_v = tile_offsets(S_Q, o_t, o_k), tile_offsets(S_K, o_t, o_k), tile_offsets(S_V, o_t, o_v)
    x_b, x_z, x_o = tile_offsets(S_B, o_t, o_b), tile_offsets(S_Z, o_t, o_v), tile_offsets(H * V, o_t, o_v)
    x_g = tile_offsets(S_G, o_t, o_g)
    offsets = (o_t, o_k, o_v, o_b, o_g, x_q, x_k, x_v, x_b, x_z, x_g, x_o)
    factor = scale if HAS_SCALE else None
    if SAVE_STATES and not BY_INTERVAL:
        p_s = states + (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) * H + i_h) * (K * V)

    # the state is a tuple of slices [BV, BS]
    if BY_INTERVAL:
        p_h0 = states + (i_c.to(tl.int64) * H + i_h) * (K * V)
        b_h = load_state(p_h0, o_k, o_v, T_n > 0, K, V, SLICES, True)
    elif USE_INITIAL_STATE:
        p_h0 = h0 + i_r * s_h + i_h * (K * V)
        b_h = load_state(p_h0, o_k, o_v, read if POOLED else None, K, V, SLICES, STATE_V_FIRST)
    else:
        b_h = zero_state(BV, BS, SLICES)

    NT = T_n // BT
    # the first full chunk; without PREFETCH the compiler drops these loads
    b_q = load_tile(q + i_x * S_Q + x_q, o_t, o_k, NT, K, False)
    b_k = load_tile(k + i_x * S_K + x_k, o_t, o_k, NT, K, False)
    b_v = load_tile(v + i_x * S_V + x_v, o_t, o_v, NT, V, False)
    b_b = load_tile(beta + i_x * S_B + x_b, o_t, o_b, NT, V, False)
    b_z = load_tile(z + i_x * S_Z + x_z, o_t, o_v, NT, V, False) if HAS_Z else b_v
    b_g = load_tile(g + i_x * S_G + x_g, o_t, o_g, NT, V, False) if HAS_G and not SCALAR_G else b_v
    for i_s in range(tl.cdiv(T_n, INTERVAL)):
        if SAVE_STATES and not BY_INTERVAL:
            # states are saved as [V, K], the layout that they have in registers
            store_state(p_s, b_h, o_k, o_v, None, K, V, True)
            p_s += H * K * V
        for i_t in tl.range(i_s * (INTERVAL // BT), tl.minimum((i_s + 1) * (INTERVAL // BT), NT), num_stages=STAGES):
            b_h, b_q, b_k, b_v, b_b, b_z, b_g = forward_chunk(
                b_h, b_q, b_k, b_v, b_b, b_z, b_g, b_D, tensors, strides, offsets, i_x, i_gram, BT, NT - 1 - i_t, factor, K, V,
                DOT, OPTIONS, PREFETCH, RELOAD, ROWS, OUTPUT, False,
            )
            i_x += BT
            i_gram += H
    # the tokens after the last full chunk
    left = T_n - NT * BT
    if left > 0:
        b_h = forward_chunk(
            b_h, b_q, b_k, b_v, b_b, b_z, b_g, b_D, tensors, strides, offsets, i_x, i_gram, left, 0, factor, K, V, DOT,
            OPTIONS, False, RELOAD, 0, OUTPUT, True,
        )[0]

    if SAVE_STATES and IS_VARLEN and not BY_INTERVAL:
        spare = has_spare_slot(bos, bos + T_n, INTERVAL)
        store_state(p_s, zero_state(BV, BS, SLICES), o_k, o_v, spare, K, V, True)
    if STORE_FINAL_STATE and not BY_INTERVAL:
        p_ht = ht + i_w * s_h + i_h * (K * V)
        store_state(p_ht, b_h, o_k, o_v, written if POOLED else None, K, V, STATE_V_FIRST)


def chunk_longhorn_exact_fwd(
    args: Arguments, ht: torch.Tensor | None, states: torch.Tensor | None, pool: Pool | None,
) -> torch.Tensor:
    """Return `o`; write the final state to `ht` and the states for backward to `states`, where given."""
    B, T, H, K, V = args.sizes
    x, strides = strided_inputs(args)
    key, interval, N = launch_key(x), checkpoint_interval(K), x.num_sequences
    gram, a = chunk_longhorn_exact_gram(x, strides, key)
    h0 = x.initial_state if pool is None else pool.states
    # programs of a sequence without a row write nothing
    o = x.v.new_empty(x.v.shape) if pool is None else x.v.new_zeros(x.v.shape)
    kernel, config = chunk_longhorn_exact_fwd_kernel_o, for_forward(key)
    blocks = H * triton.cdiv(V, config.BV)
    passes = [dict(config.of(kernel), OUTPUT=True, BY_INTERVAL=False, programs=N)]
    if is_split(N * blocks * config.num_warps, T, interval, x.q.device):
        slots = num_checkpoints(B, T, N, interval, x.cu_seqlens is not None)
        if states is None:
            states = x.q.new_empty((slots, H, K, V), dtype=torch.float32)
        passes = [
            dict(for_states(key).of(kernel), OUTPUT=False, BY_INTERVAL=False, programs=N),
            dict(config.of(kernel), OUTPUT=True, BY_INTERVAL=True, programs=slots),
        ]
    for form in passes:
        kernel[(form.pop('programs') * blocks,)](
            x.q, x.k, x.v, x.beta, x.D, x.z, x.g, gram, a, h0, o, ht, states, x.cu_seqlens, x.scale, T, N, H=H, K=K, V=V,
            **strides, INTERVAL=interval, DOT=key.precision, OPTIONS=x.step_options, SCALAR_BETA=x.beta.dim() == 3,
            SCALAR_G=is_scalar(x.g), STATE_V_FIRST=x.state_v_first, **row_arguments(pool, H * K * V), **form, **FUSED,
        )
    return o
