"""Exact update, chunkwise backward: a replay of all intervals, a reverse pass over the sequence, the sums over channels."""

from __future__ import annotations

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
    of_gate,
    step_factors,
    step_sizes,
    stores_cs,
    strided_inputs,
    with_token_stride,
)
from fla_longhorn.ops.triton.exact.backward_qk import chunk_longhorn_exact_bwd_qk
from fla_longhorn.ops.triton.exact.common import (
    chunk_decays,
    chunk_offsets,
    decayed_reverse_substitution,
    gram_pointers,
    gram_rows,
    head_index_and_channels,
    load_tile,
    operand,
    operand_dtype,
    product,
    products_until,
    reverse_substitution,
    rounded,
    row,
    split_product,
    tile_mask,
    tile_offsets,
)
from fla_longhorn.ops.triton.exact.configs import for_backward, for_replay, span_size, state_parts
from fla_longhorn.ops.triton.exact.gram import chunk_longhorn_exact_gram
from fla_longhorn.ops.triton.exact.replay import chunk_longhorn_exact_bwd_kernel_replay
from fla_longhorn.ops.triton.exact.state import load_slice, load_state, store_state, zero_state
from fla_longhorn.ops.triton.slots import first_slot, sequence_range


@triton.jit
def backward_chunk(
    b_dh, b_q, b_k, b_dy, b_b, b_g, b_D, inputs, outputs, strides, offsets, i_x, i_gram, left, left_next, scale,
    K: tl.constexpr, V: tl.constexpr, DOT: tl.constexpr, OPTIONS: tl.constexpr, STORE_W: tl.constexpr,
    PREFETCH: tl.constexpr, ROWS: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Store one chunk's gradients of v and beta; return that of its initial state, in slices, and the next chunk's tiles.

    The next chunk is the one before this one in the sequence. With `PREFETCH`, this chunk's tiles of q, k, dY, beta
    and g are arguments, and the next chunk's are loaded before anything is stored, because loads do not move across stores.
    Without a g per channel, `b_g` is b_dy.
    """
    dy, q, k, v, beta, g, gram, a, cs, hs, ps = inputs
    ws, dv, dbeta, dg = outputs
    S_Q, S_K, S_V, S_B, S_G, S_DY, S_X = strides
    o_t, o_k, o_v, o_b, o_g, x_q, x_k, x_v, x_b, x_g, x_dy, x_x = offsets
    SCALAR_BETA: tl.constexpr = o_b.shape[0] == 1
    BT: tl.constexpr = o_t.shape[0]
    SLICES: tl.constexpr = len(b_dh)
    BV: tl.constexpr = o_v.shape[0]
    GATED: tl.constexpr = g is not None
    SCALAR_G: tl.constexpr = o_g.shape[0] == 1
    i_next = i_x - BT
    if SCALAR_BETA:
        EARLY: tl.constexpr = False
    else:
        # above K = 16, there are not enough registers for float32
        EARLY: tl.constexpr = PREFETCH and (o_k.shape[0] == 16 or cs.dtype.element_ty != tl.float32)
    m_v = tile_mask(o_t, o_v, left, V, BV, PARTIAL)
    p_gram, p_a = gram_pointers(gram, a, i_gram, BT, DOT, GATED)
    rows = gram_rows(p_gram, ROWS, BT, True)
    p_q, p_k = q + i_x * S_Q + x_q, k + i_x * S_K + x_k
    if not PREFETCH:
        if SLICES == 1:
            # loaded before dY: after it, thousands of values spill at K = 256 on an A100
            b_q = load_slice(p_q, o_t, o_k, 0, left, K, PARTIAL)
            b_k = load_slice(p_k, o_t, o_k, 0, left, K, PARTIAL)
        # [BT, BV]
        b_dy = load_tile(dy + i_x * S_DY + x_dy, o_t, o_v, left, V, PARTIAL)
        b_g = b_dy if g is None or SCALAR_G else load_tile(g + i_x * S_G + x_g, o_t, o_g, left, V, PARTIAL)
    # X^T [BV, BT]; `a` holds A^T
    b_x, b_ks, b_next = tl.zeros([BV, BT], dtype=tl.float32), (), ()
    if GATED:
        b_d = chunk_decays(None if SCALAR_G else b_g, g + i_x * S_G, o_t, left, S_G, BV)
        b_until = products_until(b_d)
        # [BV], the decay of the whole chunk
        b_total = row(b_until, BT - 1)
        b_y = b_dy.to(tl.float32) * b_until
    else:
        b_dyt = tl.trans(operand(b_dy, DOT))
    for s in tl.static_range(SLICES):
        if SLICES > 1:
            # [BT, BS]
            b_q = load_slice(p_q, o_t, o_k, s, left, K, PARTIAL)
            b_k = load_slice(p_k, o_t, o_k, s, left, K, PARTIAL)
            b_ks = b_ks + (b_k,)
        b_x = split_product(b_dh[s], tl.trans(b_k), b_x, DOT)
        if scale is not None:
            b_qs = b_q.to(tl.float32) * scale
        else:
            b_qs = b_q
        if GATED:
            b_next = b_next + (split_product(b_y, operand(b_qs, DOT), b_dh[s] * b_total[:, None], DOT, True),)
        else:
            b_next = b_next + (product(b_dyt, b_qs, b_dh[s], DOT),)
    b_dh = b_next
    for part in tl.static_range(0 if GATED else 1 if DOT == 'ieee' else 2):
        b_a = tl.load(p_a + part * (BT * BT) + o_t[:, None] * BT + o_t[None, :])
        b_x = product(b_dyt, tl.trans(b_a), b_x, DOT)
    if PREFETCH:
        n_q = load_tile(q + i_next * S_Q + x_q, o_t, o_k, left_next, K, False)
        n_k = load_tile(k + i_next * S_K + x_k, o_t, o_k, left_next, K, False)
        n_dy = load_tile(dy + i_next * S_DY + x_dy, o_t, o_v, left_next, V, False)
        n_b = load_tile(beta + i_next * S_B + x_b, o_t, o_b, left_next, V, False)
        n_g = n_dy if g is None or SCALAR_G else load_tile(g + i_next * S_G + x_g, o_t, o_g, left_next, V, False)
        if EARLY:
            b_c = load_tile(cs + i_x * S_X + x_x, o_t, o_v, left, V, False)
    else:
        b_b = load_tile(beta + i_x * S_B + x_b, o_t, o_b, left, V, PARTIAL)
    b_b = b_b.to(tl.float32)
    # [BT]
    b_n = tl.load(p_gram + BT * BT + o_t)
    # [BT, BV]
    if stores_cs(OPTIONS):
        b_e = step_sizes(b_b, b_n[:, None], OPTIONS)
    else:
        b_e, _, b_slope = step_factors(b_b, b_n[:, None], OPTIONS)
    b_e = tl.broadcast_to(b_e, (BT, BV))
    # adding a loaded tile gives X that tile's layout
    if SCALAR_BETA:
        b_x = tl.trans(b_x) + 0.0 * b_dy.to(tl.float32)
    else:
        b_x = tl.trans(b_x) + 0.0 * (b_b if stores_cs(OPTIONS) else b_e)
    if GATED:
        b_x = decayed_reverse_substitution(b_x, b_dy.to(tl.float32), b_e, b_d, p_gram, p_a, BT)
    else:
        b_x = reverse_substitution(b_x, b_e, rows, p_gram, BT, ROWS)
    b_w = b_x * b_e
    b_dv = b_w
    if b_D is not None:
        if not PREFETCH:
            # again, because there are not enough registers to hold it
            b_dy = load_tile(dy + i_x * S_DY + x_dy, o_t, o_v, left, V, PARTIAL)
        b_dv += b_D[None, :] * b_dy.to(tl.float32)
    tl.store(dv + i_x * S_X + x_x, rounded(b_dv, dv.dtype.element_ty), mask=m_v)
    if SCALAR_BETA:
        tl.store(ws + i_x * S_X + x_x, operand(b_x, DOT), mask=m_v)
    else:
        if not EARLY:
            b_c = load_tile(cs + i_x * S_X + x_x, o_t, o_v, left, V, PARTIAL)
        b_c = b_c.to(tl.float32)
        if not stores_cs(OPTIONS):
            b_c *= b_slope
        tl.store(dbeta + i_x * S_X + x_x, rounded(b_x * b_c, dbeta.dtype.element_ty), mask=m_v)
        if STORE_W:
            tl.store(ws + i_x * S_X + x_x, operand(b_w, DOT), mask=m_v)
    if GATED:
        b_v = load_tile(v + i_x * S_V + x_v, o_t, o_v, left, V, PARTIAL).to(tl.float32)
        b_change = tl.load(ps + i_x * S_X + x_x, mask=m_v, other=0.0) - b_w * b_v
        b_w *= b_until
    b_next = ()
    for s in tl.static_range(SLICES):
        if SLICES > 1:
            b_k = b_ks[s]
        elif not PREFETCH:
            # again, because there are not enough registers to hold it
            b_k = load_slice(p_k, o_t, o_k, 0, left, K, PARTIAL)
        b_next = b_next + (split_product(b_w, operand(-b_k.to(tl.float32), DOT), b_dh[s], DOT, True),)
    b_dh = b_next
    if GATED:
        # a span is a chunk, whose slot has its matrices' number
        b_dg = decay_gradients(b_dh, load_state(hs + i_gram * (K * V), o_k, o_v, None, K, V, SLICES, True), b_change)
        # what nothing is left of has no gradient, not even its rounding error
        b_dg = tl.where(b_d > 0.0, b_dg, 0.0)
        tl.store(dg + i_x * S_X + x_x, rounded(b_dg, dg.dtype.element_ty), mask=m_v)
    if PREFETCH:
        return b_dh, n_q, n_k, n_dy, n_b, n_g
    else:
        return (b_dh,)


@triton.jit
def decay_gradients(b_dh, b_h, b_change):
    r"""The gradients of g `[BT, BV]`, given a chunk's initial state, that state's gradient, and `dO O - dV V` in `b_change`.

    That of token t is :math:`\sum_j dP_t P_t`, and from one to the next it changes by `dO O - dV V`. Sums over a longer part
    of a sequence would lose digits.
    """
    BT: tl.constexpr = b_change.shape[0]
    o_t = tl.arange(0, BT)
    b_zero = tl.zeros_like(b_dh[0])
    b_sum = tl.zeros([b_zero.shape[0]], dtype=tl.float32)
    for s in tl.static_range(len(b_dh)):
        # a plain product could be fused with the sum over lanes, whose copies would then differ in their last bit
        b_sum += tl.sum(tl.fma(b_dh[s], b_h[s].to(tl.float32), b_zero), 1)
    # [BT, BV]
    b_dg = b_sum[None, :] + 0.0 * b_change
    for s in tl.static_range(1, BT):
        b_dg = tl.where((o_t == s)[:, None], (row(b_dg, s - 1) - row(b_change, s - 1))[None, :], b_dg)
    return b_dg


@triton.heuristics({
    'HAS_SCALE': lambda args: args['scale'] != 1.0,
    'STORE_W': lambda args: args['ws'] is not args['dv'],
    **given(HAS_D='D', HAS_G='g', USE_INITIAL_STATE='dh0', USE_FINAL_STATE_GRADIENT='dht', IS_VARLEN='cu_seqlens'),
})
@triton.jit(do_not_specialize=['T'])
def chunk_longhorn_exact_bwd_kernel(
    dy, dht, q, k, v, beta, D, g, gram, a, cs, hs, ps, ws, dhs, dv, dbeta, dg, dh0, cu_seqlens, scale, T,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S_Q: tl.constexpr, S_K: tl.constexpr, S_V: tl.constexpr,
    S_B: tl.constexpr, S_G: tl.constexpr, S_DY: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    BV: tl.constexpr, VEC: tl.constexpr, STAGES: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
    PREFETCH: tl.constexpr, ROWS: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, HAS_D: tl.constexpr, HAS_G: tl.constexpr, HAS_SCALE: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, USE_FINAL_STATE_GRADIENT: tl.constexpr, IS_VARLEN: tl.constexpr, STORE_W: tl.constexpr,
):
    r"""One block of channels of one sequence, chunk by chunk from its end, with the state's gradient `[BV, BK]` in registers.

    In the notation of the forward kernel, with `dS` the gradient of the state at the chunk's end:

    .. math::
        X = A^\top dY + K\,dS - \mathrm{tril}_{<}(G)^\top W, \quad W = E \odot X, \quad
        dV = W, \quad d\epsilon = X \odot R, \quad dS \leftarrow dS + Q^\top dY - K^\top W

    `a` includes the scale, q does not. dbeta is X times `cs`; without `stores_cs`, `cs` holds U and the slope of the step size
    is a factor too. For the sums over channels, the kernel stores W (X for a scalar step) in `ws`, and the gradients of the
    states at the ends of the spans in `dhs`. With g, spans are chunks, and their initial states in `hs` are read for dg.
    """
    i_h, i_n, i_v = head_index_and_channels(H, V, BV)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    NT = T_n // BT
    left = T_n - NT * BT

    offsets = chunk_offsets(i_v, BT, BS, BV, VEC, SCALAR_BETA, SCALAR_G)
    o_t, o_k, o_v, o_b, o_g = offsets
    SLICES: tl.constexpr = BK // BS
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V)
    b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32) if HAS_D else None

    dy, q, k, ws, dv = dy + i_h * V, q + i_h * K, k + i_h * K, ws + i_h * V, dv + i_h * V
    beta, dbeta = beta + (i_h if SCALAR_BETA else i_h * V), dbeta + i_h * V
    if not SCALAR_BETA:
        cs += i_h * V
    if HAS_G:
        g, v, ps, dg = g + (i_h if SCALAR_G else i_h * V), v + i_h * V, ps + i_h * V, dg + i_h * V
    inputs, outputs = (dy, q, k, v, beta, g, gram, a, cs, hs, ps), (ws, dv, dbeta, dg)
    strides = (S_Q, S_K, S_V, S_B, S_G, S_DY, H * V)
    # int32, because there are not enough registers for int64 at K = 64
    x_q, x_k = o_t[:, None] * S_Q + o_k[None, :], o_t[:, None] * S_K + o_k[None, :]
    x_b, x_dy, x_x = tile_offsets(S_B, o_t, o_b), tile_offsets(S_DY, o_t, o_v), tile_offsets(H * V, o_t, o_v)
    x_g, x_v = tile_offsets(S_G, o_t, o_g), tile_offsets(S_V, o_t, o_v)
    offsets = (o_t, o_k, o_v, o_b, o_g, x_q, x_k, x_v, x_b, x_g, x_dy, x_x)
    factor = scale if HAS_SCALE else None

    # begin at the last full chunk
    i_x = bos + (NT - 1) * BT
    i_gram = (first_slot(bos, i_n, T, BT, IS_VARLEN) + (NT - 1)) * H + i_h
    p_dhs = dhs + ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + tl.cdiv(T_n, SPAN) - 1) * H + i_h) * (PARTS * K * V)

    if USE_FINAL_STATE_GRADIENT:
        b_dh = load_state(dht + o_state, o_k, o_v, None, K, V, SLICES, STATE_V_FIRST)
    else:
        b_dh = zero_state(BV, BS, SLICES)
    # 1 if the tokens after the last full chunk are in its span, whose dS is then stored already
    shared = left * 0
    if left > 0:
        store_state(p_dhs, b_dh, o_k, o_v, None, K, V, True, PARTS)
        if NT % (SPAN // BT) == 0:
            p_dhs -= H * PARTS * K * V
        else:
            shared = left * 0 + 1
        b_dh = backward_chunk(
            b_dh, None, None, None, None, None, b_D, inputs, outputs, strides, offsets, i_x + BT, i_gram + H, left, 0, factor,
            K, V, DOT, OPTIONS, STORE_W, False, 0, True,
        )[0]
    # the last full chunk; without PREFETCH the compiler drops these loads
    b_q = load_tile(q + i_x * S_Q + x_q, o_t, o_k, NT, K, False)
    b_k = load_tile(k + i_x * S_K + x_k, o_t, o_k, NT, K, False)
    b_dy = load_tile(dy + i_x * S_DY + x_dy, o_t, o_v, NT, V, False)
    b_b = load_tile(beta + i_x * S_B + x_b, o_t, o_b, NT, V, False)
    b_g = load_tile(g + i_x * S_G + x_g, o_t, o_g, NT, V, False) if HAS_G and not SCALAR_G else b_dy
    NS = tl.cdiv(NT, SPAN // BT)
    for j_s in range(NS):
        i_s = NS - 1 - j_s
        store_state(p_dhs, b_dh, o_k, o_v, j_s >= shared, K, V, True, PARTS)
        p_dhs -= H * PARTS * K * V
        chunks = tl.minimum(SPAN // BT, NT - i_s * (SPAN // BT))
        for j in tl.range(chunks, num_stages=STAGES):
            tiles = backward_chunk(
                b_dh, b_q, b_k, b_dy, b_b, b_g, b_D, inputs, outputs, strides, offsets, i_x, i_gram, BT,
                i_s * (SPAN // BT) + chunks - 1 - j, factor, K, V, DOT, OPTIONS, STORE_W, PREFETCH, ROWS, False,
            )
            b_dh = tiles[0]
            if PREFETCH:
                b_q, b_k, b_dy, b_b, b_g = tiles[1], tiles[2], tiles[3], tiles[4], tiles[5]
            i_x -= BT
            i_gram -= H
    if USE_INITIAL_STATE:
        store_state(dh0 + o_state, b_dh, o_k, o_v, None, K, V, STATE_V_FIRST)


def chunk_longhorn_exact_bwd(
    do: torch.Tensor, dht: torch.Tensor | None, states: torch.Tensor, args: Arguments,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, beta, the initial state, D and z (`None` for an absent one), and of a g given."""
    args, strides = strided_inputs(args)
    q, k, v, beta, D, z, g = args.q, args.k, args.v, args.beta, args.D, args.z, args.g
    cu_seqlens, scale, gated = args.cu_seqlens, args.scale, g is not None
    do, s_do = with_token_stride(do)
    dht = None if dht is None else dht.contiguous()
    B, T, H, K, V = args.sizes
    N = args.num_sequences
    key, interval = launch_key(args), checkpoint_interval(K)
    precision = key.precision
    span, parts = span_size(K, precision, gated), state_parts(K, precision, gated)
    scalar_beta, has_cs = beta.dim() == 3, stores_cs(args.step_options)
    dtype = operand_dtype(precision)
    gram, a = chunk_longhorn_exact_gram(args, strides, key, scale)

    dv, dbeta = v.new_empty(v.shape), beta.new_empty(beta.shape)
    dh0 = None if args.initial_state is None else torch.empty_like(args.initial_state)
    dz = None if z is None else z.new_empty(z.shape)
    cs = v.new_empty(v.shape, dtype=torch.float32) if has_cs and not scalar_beta else None
    us = v.new_empty(v.shape, dtype=dtype)
    # no buffer of its own where W is dv
    ws = dv if dv.dtype == dtype and D is None and not scalar_beta else torch.empty_like(us)
    dy, s_dy = (do, s_do) if z is None else (torch.empty_like(us), H * V)
    # the gradient of g needs the products of O and its gradient
    ps, dg = torch.empty_like(v, dtype=torch.float32, memory_format=torch.contiguous_format) if gated else None, new_dg(g, v)
    dD = None if D is None else q.new_empty((states.shape[0], H, V), dtype=torch.float32)
    slots = num_checkpoints(B, T, N, span, cu_seqlens is not None)
    hs, dhs = (q.new_empty((slots, H, parts, V, K), dtype=dtype) for _ in range(2))
    flags = {'OPTIONS': args.step_options, 'SCALAR_BETA': scalar_beta, 'SCALAR_G': is_scalar(g)}

    kernel, config = chunk_longhorn_exact_bwd_kernel_replay, for_replay(key)
    kernel[(H * states.shape[0] * triton.cdiv(V, config.BV),)](
        q, k, v, beta, D, z, g, do, gram, a, states, us, cs, hs, ps, dD, dy, dz, cu_seqlens, scale, T, N, H=H, K=K, V=V,
        **strides, S_DO=s_do, INTERVAL=interval, SPAN=span, PARTS=parts, DOT=precision, **flags, **config.of(kernel), **FUSED,
    )
    s_v, strides = strides['S_V'], {name: strides[name] for name in ('S_Q', 'S_K', 'S_B', 'S_G')} | {'S_DY': s_dy}
    kernel, config = chunk_longhorn_exact_bwd_kernel, for_backward(key)
    kernel[(H * N * triton.cdiv(V, config.BV),)](
        dy, dht, q, k, v if gated else None, beta, D, g, gram, a, cs if has_cs else us, hs if gated else None, ps, ws,
        dhs, dv, dbeta, dg, dh0, cu_seqlens, scale, T,
        H=H, K=K, V=V, S_V=s_v, **strides, SPAN=span, PARTS=parts, DOT=precision, STATE_V_FIRST=args.state_v_first, **flags,
        **config.of(kernel), **FUSED,
    )
    dq, dk = chunk_longhorn_exact_bwd_qk(q, k, beta, g, dy, us, ws, hs, dhs, dbeta, cu_seqlens, scale, key, flags, strides)
    dD = None if D is None or dD is None else dD.sum(0).to(D.dtype)
    return (dq, dk, dv, dbeta, dh0, dD, dz) if g is None else (dq, dk, dv, dbeta, dh0, dD, dz, of_gate(dg, g))
