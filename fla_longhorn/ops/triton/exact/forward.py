"""The exact update, chunkwise forward: the state stays on chip, and one substitution solves all channels of a chunk."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import FUSED, decays, is_scalar, launch_key, sigmoid, step_sizes, strided_inputs
from fla_longhorn.ops.triton.exact.common import (
    add_reads,
    add_updates,
    chunk_offsets,
    gram_rows,
    head_index_and_channels,
    interval_of,
    is_split,
    load_keys,
    load_tile,
    padded,
    products_after,
    reads,
    store_tile,
    substitution,
    token_strides,
)
from fla_longhorn.ops.triton.exact.configs import for_chunks, for_lanes, has_lanes, walks_back
from fla_longhorn.ops.triton.exact.gram import chunk_longhorn_exact_gram, gram_pointers
from fla_longhorn.ops.triton.exact.mma.forward import chunk_longhorn_exact_fwd_kernel_mma
from fla_longhorn.ops.triton.exact.mma.operands import chunk_longhorn_exact_operands
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, has_spare_slot, locate_slot, locate_states, row_arguments, sequence_range


@triton.jit
def skip_and_silu(b_o, b_D, b_v, b_z):
    """`(O + D * V) * silu(Z)`; D and Z may be None."""
    if b_D is not None:
        b_o += b_D[None, :] * b_v
    if b_z is not None:
        b_o *= b_z * sigmoid(b_z)
    return b_o


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_fwd_kernel_o(
    q,
    k,
    v,
    beta,
    D,
    z,
    g,
    gram,
    a,
    h0,
    o,
    ht,
    states,
    cu_seqlens,
    scale,
    T,
    N,
    state_indices,
    final_state_indices,
    has_initial_state,
    pad_slot_id,
    s_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    DOT: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    POOLED: tl.constexpr,
    OUTPUT: tl.constexpr,
    BY_INTERVAL: tl.constexpr,
):
    r"""The outputs of one block of channels of one sequence, chunk by chunk, with the state `[BV, BK]` in registers.

    With `E` the step sizes, `G = K K^T`, `A = tril(Q K^T)` and `S` the state at the chunk's start:

    .. math::
        R = V - K S - \mathrm{tril}_{<}(G)\,U, \quad U = E \odot R, \quad O = Q S + A U, \quad S \leftarrow S + K^\top U

    This is Theorem 3.1 of arXiv 2407.14207 unrolled over a chunk: DeltaNet's chunkwise form with a step size per channel.
    The state and `U^T` are the first operands of the products, and a thread owns whole columns of `[BT, BV]`, so that the
    substitution takes only FMA. A decay multiplies what is read token by token.

    With POOLED, `h0` and `ht` are a pool, with rows given by the indices; else row n is sequence n's. Without OUTPUT, only the
    states are computed. With BY_INTERVAL, a program computes one interval, from the state in `states`.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    INTERVAL: tl.constexpr = interval_of(K)
    SAVE_STATES: tl.constexpr = states is not None and not BY_INTERVAL
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
    o_t, o_k, o_v, o_1 = chunk_offsets(i_v, BT, padded(K), BV, VEC)
    q, k, v, o = q + i_h * K, k + i_h * K, v + i_h * V, o + i_h * V
    if SCALAR_BETA:
        beta, o_beta = beta + i_h, o_1
    else:
        beta, o_beta = beta + i_h * V, o_v
    if z is not None:
        z += i_h * V
    if SCALAR_G:
        g, o_g = g + i_h, o_1
    elif g is not None:
        g, o_g = g + i_h * V, o_v
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)

    # [BV, BK]
    if BY_INTERVAL:
        b_h = load_state(states + (i_c.to(tl.int64) * H + i_h) * (K * V), o_k, o_v, T_n > 0, K, V, True)
    elif h0 is not None:
        b_h = load_state(h0 + i_r * s_h + i_h * (K * V), o_k, o_v, read if POOLED else None, K, V, STATE_V_FIRST)
    else:
        b_h = tl.zeros([BV, padded(K)], dtype=tl.float32)
    if SAVE_STATES:
        p_s = states + (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) * H + i_h) * (K * V)

    # a chunk's tiles are loaded before the last one's output is stored, because loads do not move across stores; in float32,
    # because the compiler would pack and unpack 16-bit tiles that a loop carries
    b_v = load_tile(v, S.v, bos, o_t, o_v, T_n, V).to(tl.float32)
    b_beta = load_tile(beta, S.beta, bos, o_t, o_beta, T_n, V).to(tl.float32)
    if z is not None:
        b_z = load_tile(z, S.z, bos, o_t, o_v, T_n, V).to(tl.float32)
    for i_s in range(0, T_n, INTERVAL):
        if SAVE_STATES:
            # states are saved as [V, K], the layout that they have in registers
            store_state(p_s, b_h, o_k, o_v, None, K, V, True)
            p_s += H * K * V
        for i_t in tl.range(i_s, tl.minimum(i_s + INTERVAL, T_n), BT, num_stages=1):
            i_x, left = bos + i_t, T_n - i_t
            p_gram, p_a = gram_pointers(gram, a, i_gram, BT)
            b_k = load_keys(k, S.k, i_x, o_t, o_k, left, K)
            if OUTPUT:
                b_q = load_keys(q, S.q, i_x, o_t, o_k, left, K)
            rows = gram_rows(p_gram, BT)
            # [BT]
            b_n = tl.load(p_gram + BT * BT + o_t)
            # [BV, BT]
            b_p = reads(b_h, b_k, DOT, False)
            if OUTPUT:
                b_o = reads(b_h, b_q, DOT, False)
            # after the products, so that tiles keep the layout of loads, in which a thread owns columns
            next_v = load_tile(v, S.v, i_x + BT, o_t, o_v, left - BT, V)
            next_beta = load_tile(beta, S.beta, i_x + BT, o_t, o_beta, left - BT, V)
            if z is not None:
                next_z = load_tile(z, S.z, i_x + BT, o_t, o_v, left - BT, V)
            b_d = None
            if g is not None:
                b_d = tl.broadcast_to(decays(load_tile(g, S.g, i_x, o_t, o_g, left, V)), b_v.shape)
            # [BT, BV]
            b_e = tl.broadcast_to(step_sizes(b_beta, b_n[:, None], OPTIONS), b_v.shape)
            b_u = substitution(tl.trans(b_p), b_v, b_e, b_d, rows, 'ieee') * b_e
            if OUTPUT:
                b_o = add_reads(b_o, b_u, b_d, p_a, DOT)
            if b_d is not None:
                b_after, b_total = products_after(b_d)
                b_h, b_u = b_h * b_total[:, None], b_u * b_after
            b_h = add_updates(b_h, b_u, b_k, DOT)
            if OUTPUT:
                if scale is not None:
                    b_o *= scale
                store_tile(o, H * V, i_x, o_t, o_v, left, V, skip_and_silu(b_o, b_D, b_v, b_z if z is not None else None))
            b_v, b_beta = next_v.to(tl.float32), next_beta.to(tl.float32)
            if z is not None:
                b_z = next_z.to(tl.float32)
            i_gram += H

    if SAVE_STATES and IS_VARLEN:
        spare = has_spare_slot(bos, bos + T_n, INTERVAL)
        store_state(p_s, tl.zeros_like(b_h), o_k, o_v, spare, K, V, True)
    if ht is not None and not BY_INTERVAL:
        store_state(ht + i_w * s_h + i_h * (K * V), b_h, o_k, o_v, written if POOLED else None, K, V, STATE_V_FIRST)


def chunk_longhorn_exact_fwd(
    args: Arguments, ht: torch.Tensor | None, states: torch.Tensor | None, pool: Pool | None,
    updates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `o`; write the final state to `ht` and the states for backward to `states`, where given.

    U is stored in `updates`, where it is given.
    """
    B, T, H, K, V = args.sizes
    x, steps = strided_inputs(args)
    strides = token_strides(steps)
    key, interval, N = launch_key(x), checkpoint_interval(K), x.num_sequences
    # programs of a sequence without a row write nothing
    o = x.v.new_empty(x.v.shape) if pool is None else x.v.new_zeros(x.v.shape)
    if has_lanes(key, x.g):
        kernel, config = chunk_longhorn_exact_fwd_kernel_mma, for_lanes(key)
        ends = None
        if updates is None:
            operands, numbers = chunk_longhorn_exact_operands(x, strides, reverse=False)
        else:
            operands, numbers = chunk_longhorn_exact_operands(x, strides, reverse=True)
            if walks_back(x, key):
                ends, states = states, None
        chunks: dict[str, Any] = dict(operands=operands, numbers=numbers, updates=updates, ends=ends)
    else:
        kernel, config = chunk_longhorn_exact_fwd_kernel_o, for_chunks(key)
        gram, a = chunk_longhorn_exact_gram(x, strides, key)
        chunks = dict(q=x.q, k=x.k, gram=gram, a=a, DOT=key.precision, SCALAR_G=is_scalar(x.g))
    blocks = H * triton.cdiv(V, config.BV)
    # programs, OUTPUT, BY_INTERVAL
    passes = [(N, True, False)]
    if is_split(N * blocks * config.num_warps, T, interval, x.q.device):
        slots = num_checkpoints(B, T, N, interval, x.cu_seqlens is not None)
        if states is None:
            states = x.q.new_empty((slots, H, K, V), dtype=torch.float32)
        passes = [(N, False, False), (slots, True, True)]
    for programs, output, by_interval in passes:
        kernel[(programs * blocks,)](
            **chunks,
            v=x.v,
            beta=x.beta,
            D=x.D,
            z=x.z,
            g=x.g,
            h0=x.initial_state if pool is None else pool.states,
            o=o,
            ht=ht,
            states=states,
            cu_seqlens=x.cu_seqlens,
            scale=None if x.scale == 1 else x.scale,
            T=T,
            N=N,
            H=H,
            K=K,
            V=V,
            S=strides,
            OPTIONS=x.step_options,
            SCALAR_BETA=x.beta.dim() == 3,
            STATE_V_FIRST=x.state_v_first,
            OUTPUT=output,
            BY_INTERVAL=by_interval,
            **row_arguments(pool, H * K * V),
            **config.of(kernel),
            **FUSED,
        )
    return o
