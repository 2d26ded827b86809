"""Exact update, chunkwise backward: a replay of all intervals, a reverse pass over the sequence, the sums over channels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments, Gradients
from fla_longhorn.ops.checkpoints import num_checkpoints
from fla_longhorn.ops.triton.common import (
    FUSED,
    decays,
    is_scalar,
    launch_key,
    step_factors,
    step_sizes,
    stores_cs,
    strided_inputs,
    with_token_stride,
)
from fla_longhorn.ops.triton.exact.backward_qk import chunk_longhorn_exact_bwd_qk
from fla_longhorn.ops.triton.exact.common import (
    add_updates,
    chunk_offsets,
    gram_rows,
    head_index_and_channels,
    load_keys,
    load_tile,
    operand_dtype,
    padded,
    reads,
    reverse_substitution,
    row,
    store_tile,
    token_strides,
)
from fla_longhorn.ops.triton.exact.configs import for_chunks, for_lanes, has_lanes, span_size, state_parts, walks_back
from fla_longhorn.ops.triton.exact.gram import chunk_longhorn_exact_gram, gram_pointers
from fla_longhorn.ops.triton.exact.mma.operands import chunk_longhorn_exact_operands
from fla_longhorn.ops.triton.exact.mma.replay import chunk_longhorn_exact_bwd_kernel_replay_mma
from fla_longhorn.ops.triton.exact.mma.reverse import chunk_longhorn_exact_bwd_kernel_mma
from fla_longhorn.ops.triton.exact.mma.walk import chunk_longhorn_exact_bwd_kernel_walk
from fla_longhorn.ops.triton.exact.replay import chunk_longhorn_exact_bwd_kernel_replay
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, num_slots, sequence_range


@triton.jit
def sums_from(b_x):
    """For each token of `[BT, BV]`, the sum of its row and the later ones; a scan would exchange rows that a thread owns."""
    BT: tl.constexpr = b_x.shape[0]
    o_t = tl.arange(0, BT)
    for s in tl.static_range(BT - 2, -1, -1):
        b_x = tl.where((o_t == s)[:, None], b_x + row(b_x, s + 1)[None, :], b_x)
    return b_x


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel(
    dy,
    dht,
    q,
    k,
    v,
    beta,
    D,
    g,
    gram,
    a,
    cs,
    hs,
    ps,
    ws,
    dhs,
    dv,
    dbeta,
    dg,
    dh0,
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
    STATE_V_FIRST: tl.constexpr,
    STORE_W: tl.constexpr,
):
    r"""One block of channels of one sequence, chunk by chunk from its end, with the state's gradient `[BV, BK]` in registers.

    In the notation of the forward kernel, with `dS` the gradient of the state at the chunk's end:

    .. math::
        X = A^\top dY + K\,dS - \mathrm{tril}_{<}(G)^\top W, \quad W = E \odot X, \quad
        dV = W, \quad d\epsilon = X \odot R, \quad dS \leftarrow dS + Q^\top dY - K^\top W

    `a` includes the scale, q does not. dbeta is X times `cs`; without `stores_cs`, `cs` holds U and the slope of the step size
    is a factor too. For the sums over channels, the kernel stores W (X for a scalar step) in `ws`, and the gradients of the
    states at the ends of the spans in `dhs`. The gradient of a g per channel is :math:`\sum_j dP_t P_t`: at a span's end
    :math:`\sum_j dS\,S`, and from one token to the one before it grows by `dO O - dV V`.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    PER_CHANNEL: tl.constexpr = g is not None and not SCALAR_G
    i_h, i_n, i_v = head_index_and_channels(H, V, BV)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_t, o_k, o_v, o_1 = chunk_offsets(i_v, BT, padded(K), BV, VEC)
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V)
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    dy, q, k, ws, dv = dy + i_h * V, q + i_h * K, k + i_h * K, ws + i_h * V, dv + i_h * V
    if SCALAR_BETA:
        beta, o_beta = beta + i_h, o_1
    else:
        beta, dbeta, cs, o_beta = beta + i_h * V, dbeta + i_h * V, cs + i_h * V, o_v
    if SCALAR_G:
        g, o_g = g + i_h, o_1
    elif PER_CHANNEL:
        g, v, ps, dg, o_g = g + i_h * V, v + i_h * V, ps + i_h * V, dg + i_h * V, o_v

    # [BV, BK]
    if dht is not None:
        b_dh = load_state(dht + o_state, o_k, o_v, None, K, V, STATE_V_FIRST)
    else:
        b_dh = tl.zeros([BV, padded(K)], dtype=tl.float32)
    NS = tl.cdiv(T_n, SPAN)
    NT = tl.cdiv(T_n, BT)
    i_gram = (first_slot(bos, i_n, T, BT, IS_VARLEN) + NT - 1) * H + i_h
    i_span = first_slot(bos, i_n, T, SPAN, IS_VARLEN) + NS - 1
    # the slot of the state behind a span
    i_end = num_slots(T, N, SPAN, IS_VARLEN) + i_n
    # the last chunk; in the loop, the one before is loaded before anything is stored, because loads do not move across stores
    i_t = tl.maximum(NT - 1, 0) * BT
    b_dy = load_tile(dy, S.do, bos + i_t, o_t, o_v, T_n - i_t, V).to(tl.float32)
    b_beta = load_tile(beta, S.beta, bos + i_t, o_t, o_beta, T_n - i_t, V).to(tl.float32)
    for j_s in range(NS):
        i_s = (NS - 1 - j_s) * SPAN
        store_state(dhs + (i_span * H + i_h) * (PARTS * K * V), b_dh, o_k, o_v, None, K, V, True, PARTS)
        if PER_CHANNEL:
            # [BV]; a plain product could be fused with the sum over lanes, whose copies would then differ in their last bit
            b_end = load_state(hs + (i_end * H + i_h) * (K * V), o_k, o_v, None, K, V, True).to(tl.float32)
            b_sum = tl.sum(tl.fma(b_dh, b_end, tl.zeros_like(b_dh)), 1)
            i_end = i_span
        i_span -= 1
        for _ in tl.range(tl.cdiv(tl.minimum(T_n - i_s, SPAN), BT), num_stages=1):
            i_x, left = bos + i_t, T_n - i_t
            p_gram, p_a = gram_pointers(gram, a, i_gram, BT)
            b_k = load_keys(k, S.k, i_x, o_t, o_k, left, K)
            rows = gram_rows(p_gram, BT)
            # [BT]
            b_n = tl.load(p_gram + BT * BT + o_t)
            # X^T [BV, BT]
            b_x = reads(b_dh, b_k, DOT, True)
            # [BT, BV]; loaded after the products, they keep the layout in which a thread owns columns
            if not SCALAR_BETA:
                b_c = load_tile(cs, H * V, i_x, o_t, o_v, left, V).to(tl.float32)
            next_dy = load_tile(dy, S.do, i_x - BT, o_t, o_v, i_t, V)
            next_beta = load_tile(beta, S.beta, i_x - BT, o_t, o_beta, i_t, V)
            b_d = None
            if g is not None:
                b_d = tl.broadcast_to(decays(load_tile(g, S.g, i_x, o_t, o_g, left, V)), (BT, BV))
            if PER_CHANNEL:
                b_p = load_tile(ps, H * V, i_x, o_t, o_v, left, V)
                b_v = load_tile(v, S.v, i_x, o_t, o_v, left, V)
            b_y = b_dy
            if stores_cs(OPTIONS):
                b_e = step_sizes(b_beta, b_n[:, None], OPTIONS)
            else:
                b_e, _, b_slope = step_factors(b_beta, b_n[:, None], OPTIONS)
                if not SCALAR_BETA:
                    b_c *= b_slope
            b_e = tl.broadcast_to(b_e, (BT, BV))
            b_x = reverse_substitution(tl.trans(b_x), b_y, b_e, b_d, rows, p_a)
            b_w = b_x * b_e
            store_tile(dv, H * V, i_x, o_t, o_v, left, V, b_w if b_D is None else b_w + b_D[None, :] * b_y)
            if SCALAR_BETA:
                store_tile(ws, H * V, i_x, o_t, o_v, left, V, b_x)
            else:
                store_tile(dbeta, H * V, i_x, o_t, o_v, left, V, b_x * b_c)
                if STORE_W:
                    store_tile(ws, H * V, i_x, o_t, o_v, left, V, b_w)
            if PER_CHANNEL:
                b_dg = b_p - b_w * b_v.to(tl.float32)
                b_dg = sums_from(b_dg) + b_sum[None, :]
                b_sum = row(b_dg, 0)
                # exactly 0 where nothing is left
                store_tile(dg, H * V, i_x, o_t, o_v, left, V, tl.where(b_d == 0.0, 0.0, b_dg))
            if b_d is not None:
                b_until = tl.cumprod(b_d, 0)
                b_dh *= row(b_until, BT - 1)[:, None]
                b_y, b_w = b_y * b_until, b_w * b_until
            if scale is not None:
                b_y *= scale
            b_q = load_keys(q, S.q, i_x, o_t, o_k, left, K)
            b_dh = add_updates(add_updates(b_dh, b_y, b_q, DOT), -b_w, b_k, DOT)
            b_dy, b_beta = next_dy.to(tl.float32), next_beta.to(tl.float32)
            i_gram -= H
            i_t -= BT
    if dh0 is not None:
        store_state(dh0 + o_state, b_dh, o_k, o_v, None, K, V, STATE_V_FIRST)


def chunk_longhorn_exact_bwd(
    do: torch.Tensor, dht: torch.Tensor | None, states: torch.Tensor, args: Arguments,
    updates: torch.Tensor | None = None,
) -> Gradients:
    """The gradients; `updates` are U as forward stored them."""
    args, strides = strided_inputs(args)
    q, k, v, beta, D, z, g = args.q, args.k, args.v, args.beta, args.D, args.z, args.g
    do, s_do = with_token_stride(do)
    B, T, H, K, V = args.sizes
    N, cu_seqlens, scale = args.num_sequences, args.cu_seqlens, None if args.scale == 1 else args.scale
    key = launch_key(args)
    per_channel = g is not None and g.dim() == 4
    scalar_beta, has_cs = beta.dim() == 3, stores_cs(args.step_options)
    dtype = operand_dtype(key.precision)

    dv, dbeta = v.new_empty(v.shape), beta.new_empty(beta.shape)
    dh0 = None if args.initial_state is None else torch.empty_like(args.initial_state)
    dz = None if z is None else z.new_empty(z.shape)
    given = updates is not None
    walk = given and walks_back(args, key)
    cs = v.new_empty(v.shape, dtype=torch.float32) if has_cs and not (scalar_beta or walk) else None
    us = v.new_empty(v.shape, dtype=dtype) if updates is None else updates
    # no buffer of its own where W is dv
    ws = dv if dv.dtype == dtype and D is None and not scalar_beta else torch.empty_like(us)
    dy, s_dy = (do, s_do) if z is None else (torch.empty_like(us), H * V)
    # the gradient of a g per channel needs the products of O and its gradient
    ps = v.new_empty(v.shape, dtype=torch.float32) if per_channel else None
    dg = g.new_empty(g.shape) if g is not None and per_channel else None
    dD = None if D is None else q.new_empty((states.shape[0], H, V), dtype=torch.float32)
    span, parts = span_size(key, per_channel), state_parts(key, per_channel)
    slots = num_checkpoints(B, T, N, span, cu_seqlens is not None)
    hs = q.new_empty((slots + (N if g is not None else 0), H, parts, V, K), dtype=dtype)
    dhs = q.new_empty((slots, H, parts, V, K), dtype=dtype)
    common: dict[str, Any] = dict(
        beta=beta,
        D=D,
        cu_seqlens=cu_seqlens,
        scale=scale,
        T=T,
        N=N,
        H=H,
        K=K,
        V=V,
        SPAN=span,
        PARTS=parts,
        OPTIONS=args.step_options,
        **FUSED,
    )
    values = dict(v=v, z=z, do=do, us=us, hs=hs, dD=dD, dy=dy, dz=dz)
    gradients = dict(
        dht=None if dht is None else dht.contiguous(),
        ws=ws,
        dhs=dhs,
        dv=dv,
        dbeta=dbeta,
        dh0=dh0,
        STATE_V_FIRST=args.state_v_first,
        STORE_W=ws is not dv,
    )
    lanes = has_lanes(key, g)
    # scalar steps need unrounded residuals; 16 entries without a gate are predicted to take 1.08 times as long there
    lanes_replay = lanes and not scalar_beta and (given or key.K > 16 or g is not None)
    if lanes:
        operands, numbers = chunk_longhorn_exact_operands(args, token_strides(strides), reverse=True)
        of_lanes: dict[str, Any] = dict(operands=operands, numbers=numbers)
    if not lanes_replay:
        gram, a = chunk_longhorn_exact_gram(args, token_strides(strides), key, scale)
        general: dict[str, Any] = dict(q=q, k=k, gram=gram, a=a, ps=ps, DOT=key.precision, SCALAR_G=is_scalar(g))
    if walk:
        config, kernel = for_lanes(key), chunk_longhorn_exact_bwd_kernel_walk
        kernel[(H * N * triton.cdiv(V, config.BV),)](
            **of_lanes,
            **values,
            **gradients,
            states=states,
            S=token_strides(strides, s_do),
            **common,
            **config.of(kernel),
        )
    else:
        if lanes_replay:
            replay, config = chunk_longhorn_exact_bwd_kernel_replay_mma, for_lanes(key)
            chunks = dict(GIVEN=given, **of_lanes)
        else:
            replay, config = chunk_longhorn_exact_bwd_kernel_replay, for_chunks(key)
            chunks = dict(SCALAR_BETA=scalar_beta, **general)
        replay[(H * states.shape[0] * triton.cdiv(V, config.BV),)](
            **chunks,
            **values,
            g=g,
            states=states,
            cs=cs,
            S=token_strides(strides, s_do),
            **common,
            **config.of(replay),
        )
        if lanes:
            reverse, config, chunks = chunk_longhorn_exact_bwd_kernel_mma, for_lanes(key), of_lanes
        else:
            reverse, chunks = chunk_longhorn_exact_bwd_kernel, dict(v=v, hs=hs, dg=dg, **general)
        reverse[(H * N * triton.cdiv(V, config.BV),)](
            **chunks,
            **gradients,
            dy=dy,
            g=g,
            cs=cs if has_cs else us,
            S=token_strides(strides, s_dy),
            SCALAR_BETA=scalar_beta,
            **common,
            **config.of(reverse),
        )
    dq, dk, dg_head = chunk_longhorn_exact_bwd_qk(
        args, dy, us, ws, hs, dhs, dbeta, scale, key, token_strides(strides, s_dy),
    )
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        beta=dbeta,
        initial_state=dh0,
        D=None if D is None or dD is None else dD.sum(0).to(D.dtype),
        z=dz,
        g=dg if per_channel else dg_head,
    )
