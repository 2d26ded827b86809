"""The compiled loops of the Numba backend's backward; names and layouts as in :mod:`fla_longhorn_cpu.forward`.

A block of `BG` channels goes through its sequence from the last interval of `C` tokens to the first. It recomputes the states
of an interval, `W` channels at a time, from the one that forward saved. If these do not fit in the cache, the interval is
split into strips of `BT` tokens, whose initial states are computed first.

With `G_t` the gradient of `S_t`, `du = sum_j G k` and `dy = do * silu(z)`, channelwise:

    diagonal:  dk_j = sum_v eps m_j + e_j,    with m_j = G_j (v - 2 k_j S_{t-1,j}),    G_{t-1} += G (1 - eps k^2),
               deps = sum_j G k (v - k S_{t-1}) = (sum_j k m + v du) / 2
    exact:     dk_j = sum_v (G eps r - S_{t-1} eps du) + e_j,    with r = v - k^T S_{t-1},    G_{t-1} += G - k (x) (eps du),
               deps = du r
    both:      dq_j = sum_v dy S_t,    dv = eps du + D dy,    e_j = -2 k_j sum_v deps eps^2 / c,
               dbeta = deps c / (1 + beta |k|^2)^2, or for a sigmoid's input x deps e eps^2 / c, with e = exp(-x) and
               c = 2 with `allow_neg_eigval`, else 1,
               dz = do * y * silu'(z),    dD = sum_t dy * v

With a gate, `P = exp(g) S_{t-1}` stands for `S_{t-1}`, what is added up to `G_{t-1}` above is the gradient of P, and

    dg = sum_j dP_j P_j,    G_{t-1} += exp(g) dP

The caller adds the parts of sums over channels (dq, dk, dbeta of a head), one per block, and those of dD, one per sequence.
Sums over a token's channels are collected in `rows`: one row of partial sums for each key, added at the end.
"""

from __future__ import annotations

import numpy as np

from fla_kit.numba import memory
from fla_kit.numba.launch import compiled
from fla_kit.numba.memory import address_of, array_at, load_one, store, store_folded, sum_rows
from fla_kit.numba.simd import W as LANES
from fla_kit.numba.simd import helper, inlined, sigmoid, sum_lanes
from fla_longhorn_cpu.forward import (
    copy_tile,
    decay_at,
    decay_buffer,
    decayed,
    diagonal_advance,
    diagonal_update,
    exact_update,
    first_slot,
    gate_at,
    load_beta,
    load_decay,
    load_tile,
    read,
    rows_ahead,
    square_norms,
    step_size,
    store_tile,
)
from fla_longhorn_cpu.wide import W, load, load_lanes, prefetch, prefetch_to_write, splat, store_lanes

HALF, ONE, TWO = np.float32(0.5), np.float32(1), np.float32(2)


@helper
def prepare(t0, L, i_h, o_v, do, v, beta, gate, z, z_stride, H, V, is_scalar, options, s_k2, tokens):
    """Fill `tokens` for `W` channels of `L` tokens from `t0`, `[L, W]` each: v, eps, dy, deps/dbeta, dz/y and decays."""
    s_v, s_eps, s_dy, s_slope, s_dz, s_decay = tokens
    n = V - o_v
    for t in range(L):
        row, i = (t0 + t) * H + i_h, t * W
        p = row * V + o_v
        b_eps, b_slope = step_size(load_beta(beta, row, p, n, is_scalar), s_k2[t], options)
        b_do = load_lanes(do, p, n)
        if len(z) > 0:
            b_z = load_lanes(z, (t0 + t) * z_stride + i_h * V + o_v, n)
            b_gate = sigmoid(b_z)
            store(s_dz, i, b_do * (b_gate * (ONE + b_z * (ONE - b_gate))))
            b_do = b_do * (b_z * b_gate)
        store(s_v, i, load_lanes(v, p, n))
        store(s_eps, i, b_eps)
        store(s_dy, i, b_do)
        store(s_slope, i, b_slope)
        if gate is not None:
            store(s_decay, i, load_decay(gate, row, p, n))


@helper
def strip_start(t0, L, i_s, i_h, q, k, gate, H, K, exact, S, p_old, p_new, tokens):
    """The final state of the strip of `L` tokens that starts `i_s` tokens into the interval at `t0`."""
    p_k = ((t0 + i_s) * H + i_h) * K
    b_x = read(S, p_old, k, p_k, K) if exact else splat(np.float32(0))
    for t in range(L):
        i, p_next = (i_s + t) * W, p_k + (H * K if t + 1 < L else 0)
        b_v, b_eps, b_decay = load(tokens[0], i), load(tokens[1], i), decay_at(gate, tokens[5], i)
        if exact:
            b_u = b_eps * (b_v - decayed(b_x, b_decay))
            _, b_x = exact_update(S, p_old, p_new, q, k, p_k, p_next, K, b_u, b_decay)
        else:
            diagonal_advance(S, p_old, p_new, k, p_k, K, b_v, b_eps, b_decay)
        p_old, p_k = p_new, p_next


@helper
def strip_forward(t0, L, i_s, i_h, o_v, q, k, gate, D, dz, dD, p_dD, H, K, V, exact, S, tokens, written):
    """Recompute the strip's states from the first one in `S`; add up dD, store dz and, for the exact update, r over v.

    `written` are the addresses of the interval's rows of dv, dbeta and dz, to prefetch.
    """
    row_bytes = H * V * dz.itemsize
    s_v, s_eps, s_dy, _, s_dz, s_decay = tokens
    n, KW, b_dD = V - o_v, K * W, splat(np.float32(0))
    b_D = load_lanes(D, i_h * V + o_v, n) if len(D) > 0 else b_dD
    p_k = ((t0 + i_s) * H + i_h) * K
    b_x, b_y = read(S, 0, k, p_k, K) if exact else b_D, b_D
    for t in range(L):
        prefetch_to_write(dz, written[0] + (i_s + t) * row_bytes)
        i, p_s, p_next = (i_s + t) * W, t * KW, p_k + (H * K if t + 1 < L else 0)
        b_v, b_eps, b_decay = load(s_v, i), load(s_eps, i), decay_at(gate, s_decay, i)
        if exact:
            b_r = b_v - decayed(b_x, b_decay)
            store(s_v, i, b_r)
            b_y, b_x = exact_update(S, p_s, p_s + KW, q, k, p_k, p_next, K, b_eps * b_r, b_decay)
        elif len(dz) > 0:
            b_y = diagonal_update(S, p_s, p_s + KW, q, k, p_k, K, b_v, b_eps, b_decay)
        else:
            diagonal_advance(S, p_s, p_s + KW, k, p_k, K, b_v, b_eps, b_decay)
        if len(dz) > 0:
            store_lanes(dz, ((t0 + i_s + t) * H + i_h) * V + o_v, load(s_dz, i) * (b_y + b_D * b_v), n)
        b_dD = b_dD + load(s_dy, i) * b_v
        prefetch_to_write(dz, written[1] + (i_s + t) * row_bytes)
        prefetch_to_write(dz, written[2] + (i_s + t + 4) * row_bytes)
        p_k = p_next
    if len(D) > 0:
        store_lanes(dD, p_dD, load_lanes(dD, p_dD, n) + b_dD, n)


@inlined
def diagonal_backward(S, p_s, G, p_g, q, k, p_k, K, b_v, b_eps, b_decay, b_dy, rows, p_rows):
    """Move `G` one token back; returns du, deps and dg. `rows` get these channels' parts of dq, from `p_rows` on of dk."""
    b_du, b_km, b_dg = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
    for j in range(K):
        b_k, b_s = load_one(k, p_k + j), decayed(load(S, p_s + j * W), b_decay)
        b_g = load(G, p_g + j * W) + load_one(q, p_k + j) * b_dy
        b_m = b_g * (b_v - (TWO * b_k) * b_s)
        b_du = b_du + b_k * b_g
        b_km = b_km + b_k * b_m
        b_dp = b_g - ((b_k * b_k) * b_eps) * b_g
        if b_decay is not None:
            b_dg = b_dg + b_dp * b_s
        store(G, p_g + j * W, decayed(b_dp, b_decay))
        store_folded(rows, j * LANES, load(S, p_s + (K + j) * W) * b_dy)
        store_folded(rows, p_rows + j * LANES, b_m * b_eps)
    return b_du, np.float32(0.5) * (b_km + b_v * b_du), b_dg


@helper
def add_output(G, p_g, q, k, p_k, K, b_dy):
    """Add the output's part to `G`, which is then the full gradient of a token's state; returns du, `k^T G`."""
    b_du = splat(np.float32(0))
    for j in range(K):
        b_g = load(G, p_g + j * W) + load_one(q, p_k + j) * b_dy
        store(G, p_g + j * W, b_g)
        b_du = b_du + load_one(k, p_k + j) * b_g
    return b_du


@inlined
def exact_backward(S, p_s, G, p_g, q, k, p_k, p_next, K, b_u, b_w, b_decay, b_dy, b_dy_next, rows, p_rows):
    """Move the full `G` one token back, with `w = eps du`; `rows` as in :func:`diagonal_backward`.

    Includes `add_output` of the token before, whose key is at `p_next`, and returns its du; also returns dg.
    """
    b_du, b_dg = splat(np.float32(0)), splat(np.float32(0))
    for j in range(K):
        b_g, b_s = load(G, p_g + j * W), decayed(load(S, p_s + j * W), b_decay)
        b_dp = b_g - load_one(k, p_k + j) * b_w
        if b_decay is not None:
            b_dg = b_dg + b_dp * b_s
        b_g1 = decayed(b_dp, b_decay) + load_one(q, p_next + j) * b_dy_next
        store(G, p_g + j * W, b_g1)
        b_du = b_du + load_one(k, p_next + j) * b_g1
        store_folded(rows, j * LANES, load(S, p_s + (K + j) * W) * b_dy)
        store_folded(rows, p_rows + j * LANES, b_g * b_u - b_s * b_w)
    return b_du, b_dg


@inlined
def add_rows(rows, p_rows, k, p_k, K, norm, dqk, p_dqk):
    """Add the sums of the rows, and `e_j = -2 k_j norm`, to a token's dq and dk, `[2, KP]`."""
    for j in range(0, K, LANES):
        p, p_dk = p_dqk + j, p_dqk + p_rows // LANES + j
        store(dqk, p, memory.load(dqk, p) + sum_rows(rows, j * LANES))
        b_e = memory.load_lanes(k, p_k + j, K - j) * (TWO * norm)
        store(dqk, p_dk, memory.load(dqk, p_dk) + (sum_rows(rows, p_rows + j * LANES) - b_e))


@helper
def strip_backward(t0, L, i_s, i_h, o_v, q, k, gate, D, dqk, dv, dbeta, dg, part, H, K, V, exact, is_scalar, options, S, G,
                   p_g, tokens, rows, ahead, z_stride):
    """The strip's tokens, last first; the block's parts of dq, dk and a head's dbeta and dg start at row `part`.

    `ahead` are the addresses of the next channels' rows of do, v, beta and z, to prefetch.
    """
    row_bytes, z_bytes = H * V * dv.itemsize, z_stride * dv.itemsize
    s_r, s_eps, s_dy, s_slope, _, s_decay = tokens
    n, b_zero, p_rows = V - o_v, splat(np.float32(0)), len(rows) // 2
    half = HALF if options[1] else ONE
    b_D = load_lanes(D, i_h * V + o_v, n) if len(D) > 0 else b_zero
    b_next = b_zero
    if exact:
        b_next = add_output(G, p_g, q, k, ((t0 + i_s + L - 1) * H + i_h) * K, K, load(s_dy, (i_s + L - 1) * W))
    for t in range(L - 1, -1, -1):
        row, i, p_s = (t0 + i_s + t) * H + i_h, (i_s + t) * W, t * K * W
        prefetch(dv, ahead[0] + (i_s + t) * row_bytes)
        prefetch(dv, ahead[1] + (i_s + t) * row_bytes)
        b_r, b_eps, b_dy, b_decay = load(s_r, i), load(s_eps, i), load(s_dy, i), decay_at(gate, s_decay, i)
        p_k = row * K
        if exact:
            b_du = b_next
            p_next, b_dy_next = (p_k - H * K, load(s_dy, i - W)) if t > 0 else (p_k, b_zero)
            b_next, b_dg = exact_backward(S, p_s, G, p_g, q, k, p_k, p_next, K, b_eps * b_r, b_eps * b_du, b_decay, b_dy,
                                          b_dy_next, rows, p_rows)
            b_deps = b_du * b_r
        else:
            b_du, b_deps, b_dg = diagonal_backward(S, p_s, G, p_g, q, k, p_k, K, b_r, b_eps, b_decay, b_dy, rows, p_rows)
        prefetch(dv, ahead[2] + (i_s + t) * row_bytes)
        prefetch(dv, ahead[3] + (i_s + t) * z_bytes)
        store_lanes(dv, row * V + o_v, b_eps * b_du + b_D * b_dy, n)
        norm = sum_lanes(b_deps * b_eps * b_eps) * half
        add_rows(rows, p_rows, k, p_k, K, norm, dqk, (part + row) * (len(rows) // LANES))
        b_dbeta = b_deps * load(s_slope, i)
        if is_scalar:
            dbeta[part + row] += sum_lanes(b_dbeta)
        else:
            store_lanes(dbeta, row * V + o_v, b_dbeta, n)
        if gate is not None:
            if gate[1]:
                dg[part + row] += sum_lanes(b_dg)
            else:
                store_lanes(dg, row * V + o_v, b_dg, n)


@helper
def backward_block(i_n, i_h, o_g, part, bos, eos, slot, do, dht, q, k, v, beta, gate, D, z, z_stride, states, dqk, dv, dbeta,
                   dg, dh0, dD, dz, H, K, V, C, BG, BT, exact, is_scalar, options, S, G, tokens, rows, s_k2):
    """`BG` channels of one head of one sequence; `G` holds the gradients of their states, `[BG / W, K, W]`."""
    KW, size = K * W, len(rows) // LANES
    p_starts = (BT + 1) * KW
    channels = range(0, min(BG, V - o_g), W)
    for i in channels:
        load_tile(dht, (i_n * H + i_h) * K * V + o_g + i, V, K, V - o_g - i, G, i * K)
    for i_c in range((eos - bos + C - 1) // C - 1, -1, -1):
        t0 = bos + i_c * C
        L = min(C, eos - t0)
        square_norms(t0, L, i_h, k, H, K, s_k2)
        for t in range(t0, t0 + L):
            row = part + t * H + i_h
            dqk[row * size:(row + 1) * size] = 0
            if is_scalar:
                dbeta[row] = 0
            if gate is not None and gate[1]:
                dg[row] = 0
        for i in channels:
            o_v = o_g + i
            prepare(t0, L, i_h, o_v, do, v, beta, gate, z, z_stride, H, V, is_scalar, options, s_k2, tokens)
            load_tile(states, ((slot + i_c) * H + i_h) * K * V + o_v, V, K, V - o_v, S, p_starts)
            # the next channels, or the first ones of the interval before
            t, o_next = (t0, o_v + W) if i + W < channels.stop else (max(t0 - C, bos), o_g)
            p = (t * H + i_h) * V + o_next
            ahead = address_of(do, p), *rows_ahead(p, t * z_stride + i_h * V + o_next, v, beta, z, is_scalar)
            p = (t0 * H + i_h) * V + o_v
            written = rows_ahead(p, p, dv, dbeta, dz, is_scalar)
            NS = (L + BT - 1) // BT
            for i_s in range(NS - 1):
                p = p_starts + i_s * KW
                strip_start(t0, BT, i_s * BT, i_h, q, k, gate, H, K, exact, S, p, p + KW, tokens)
            for i_s in range(NS - 1, -1, -1):
                copy_tile(S, p_starts + i_s * KW, 0, K)
                t, L_s = i_s * BT, min(BT, L - i_s * BT)
                strip_forward(t0, L_s, t, i_h, o_v, q, k, gate, D, dz, dD, (i_n * H + i_h) * V + o_v, H, K, V, exact, S,
                              tokens, written)
                strip_backward(t0, L_s, t, i_h, o_v, q, k, gate, D, dqk, dv, dbeta, dg, part, H, K, V, exact, is_scalar,
                               options, S, G, i * K, tokens, rows, ahead, z_stride)
    if len(dh0) > 0:
        for i in channels:
            store_tile(dh0, (i_n * H + i_h) * K * V + o_g + i, V, K, V - o_g - i, G, i * K)


@compiled
def backward(i_w, n_w, do, dht, q, k, v, beta, gate, D, z, z_stride, cu_seqlens, states, NS, dqk, dv, dbeta, dg, dg_size, dh0,
             dD, dz, H, K, V, C, BG, BT, NT, exact, is_scalar, options, is_varlen, dtype, dbeta_dtype):
    """One worker's blocks of backward, given addresses; no interval has more than `NT` tokens."""
    N, T, size, NG = len(cu_seqlens) - 1, cu_seqlens[-1], H * K * V, (V + BG - 1) // BG
    do, v, dv = array_at(do, T * H * V, dtype), array_at(v, T * H * V, dtype), array_at(dv, T * H * V, dtype)
    q, k, states = array_at(q, T * H * K), array_at(k, T * H * K), array_at(states, NS * size)
    beta, gate = array_at(beta, T * H if is_scalar else T * H * V, dtype), gate_at(gate, T, H, V)
    D, z = array_at(D, H * V if D != 0 else 0), array_at(z, (T - 1) * z_stride + H * V if z != 0 else 0, dtype)
    dD, dz = array_at(dD, N * H * V if dD != 0 else 0), array_at(dz, T * H * V if dz != 0 else 0, dtype)
    dht, dh0 = array_at(dht, N * size if dht != 0 else 0), array_at(dh0, N * size if dh0 != 0 else 0)
    dqk = array_at(dqk, NG * T * H * 2 * ((K + LANES - 1) // LANES * LANES))
    dbeta, dg = array_at(dbeta, NG * T * H if is_scalar else T * H * V, dbeta_dtype), array_at(dg, dg_size)
    num_rows = cu_seqlens[-1] * H
    # dq and dk of a token, K rounded up to whole vectors
    rows = np.zeros(2 * ((K + LANES - 1) // LANES * LANES) * LANES, np.float32)
    G = np.empty(K * BG, np.float32)
    S = np.empty((BT + 1 + (NT + BT - 1) // BT) * K * W, np.float32)
    tokens = (np.empty(NT * W, np.float32), np.empty(NT * W, np.float32), np.empty(NT * W, np.float32),
              np.empty(NT * W, np.float32), np.empty(NT * W, np.float32), decay_buffer(gate, NT))
    s_k2 = np.empty(NT, np.float32)
    for block in range(i_w, (len(cu_seqlens) - 1) * H * NG, n_w):
        i_n, i_h, i_g = block // (H * NG), block // NG % H, block % NG
        bos, eos = cu_seqlens[i_n], cu_seqlens[i_n + 1]
        slot = first_slot(i_n, bos, eos, C, is_varlen)
        backward_block(i_n, i_h, i_g * BG, i_g * num_rows, bos, eos, slot, do, dht, q, k, v, beta, gate, D, z, z_stride,
                       states, dqk, dv, dbeta, dg, dh0, dD, dz, H, K, V, C, BG, BT, exact, is_scalar, options, S, G, tokens,
                       rows, s_k2)
