"""The compiled loops of the Numba backend: one block of channels at a time, all of its tokens, states in the cache.

    diagonal:  S_t = S_{t-1} + (k_t (x) eps_t) * (r_t - k_t * S_{t-1}),    r_t = v_t
    exact:     S_t = S_{t-1} + k_t (x) (eps_t * r_t),                      r_t = v_t - k_t^T S_{t-1}
    both:      y_t = q_t^T S_t + D * v_t,    o_t = y_t * silu(z_t)

With a gate, `exp(g_t) * S_{t-1}` stands for `S_{t-1}`. `gate` is None or g, in float32, and whether it is one per head. Numba
compiles loops for each of the two, so those without a gate have no trace of it.

Arrays are flat: q, k `[T, H, K]` and v, z, o `[T, H, V]`, where T goes over all rows of a batch, beta like v or `[T, H]`, D
`[H, V]`, states `[H, K, V]` at the offsets of :mod:`fla_longhorn_cpu.places`. v, z, beta and o are float32 or bfloat16,
the others float32. The token stride of z is `z_stride`, because z is often half of a projection's output. An absent array is
empty; its address is 0.

With a sigmoid, beta = 1 / (1 + e) and e = exp(-x), so eps = beta / (1 + beta |k|^2) = 1 / (1 + e + |k|^2): one division.
With `allow_neg_eigval`, eps is twice that.

Tiles of a state are `[K, W]`: a vector holds channels of one key (:mod:`fla_longhorn_cpu.wide`).

Worker `i_w` of `n_w` computes every `n_w`-th block. No two blocks write to the same place, so results do not depend on `n_w`.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from fla_kit.numba import memory
from fla_kit.numba.launch import compiled
from fla_kit.numba.memory import address_of, array_at, load_one, store
from fla_kit.numba.simd import W as LANES
from fla_kit.numba.simd import exp, exp_neg, helper, inlined, product, sigmoid, sum_lanes
from fla_longhorn_cpu.wide import W, load, load_lanes, prefetch, prefetch_to_write, splat, store_lanes

ONE, TWO, FOUR = np.float32(1), np.float32(2), np.float32(4)
# tokens that a forward block takes at a time, a divisor of every checkpoint interval
STRIP = 16
# a partial sum adds so many entries of the key
KEYS = 8
# bytes of a block's states
L1_BYTES = 2**14


def block_size(K: int, T: int) -> int:
    """Channels of a block: two vectors, so that there are blocks for all threads; more for one token, to read long rows."""
    return min(max(L1_BYTES // (4 * K) // W, 1), 2 if T > 1 else 8) * W


@helper
def load_tile(x, p, V, K, n, tile, p_t):
    """Load a tile `[K, W]` from `n` channels of a state `[K, V]`; zero without a state and beyond `n`."""
    for j in range(K):
        store(tile, p_t + j * W, load_lanes(x, p + j * V, n if len(x) > 0 else 0))


@helper
def store_tile(x, p, V, K, n, tile, p_t):
    for j in range(K):
        store_lanes(x, p + j * V, load(tile, p_t + j * W), n)


@helper
def copy_tile(tile, p_from, p_to, K):
    for j in range(K):
        store(tile, p_to + j * W, load(tile, p_from + j * W))


# inlined, because another copy of the loop, which a process that compiles has, may round otherwise
@inlined
def square_norm(k, p, K):
    """`|k|^2` of one key; NaN from 2^126 on, where 1 / |k|^2 is subnormal, rather than a step size that looks valid."""
    b_sum = memory.splat(np.float32(0))
    for j in range(0, K, LANES):
        b_k = memory.load_lanes(k, p + j, K - j)
        b_sum = b_sum + b_k * b_k
    total = sum_lanes(b_sum)
    return total + (FOUR * total - FOUR * total)


@helper
def load_beta(beta, row, p, n, is_scalar):
    return splat(load_one(beta, row)) if is_scalar else load_lanes(beta, p, n)


@helper
def step_size(b_b, k2, options):
    """eps and its derivative by beta (or by the sigmoid's input), given `|k|^2`; `options` is `StepOptions` as a tuple."""
    use_sigmoid, is_doubled = options
    factor = TWO if is_doubled else ONE
    if use_sigmoid:
        b_e = exp_neg(b_b)
        b_eps = ONE / (b_e + (ONE + k2))
        return factor * b_eps, factor * (b_e * b_eps) * b_eps
    b_f = ONE / (ONE + b_b * k2)
    return factor * b_b * b_f, factor * b_f * b_f


@helper
def load_decay(gate, row, p, n):
    """`exp(g)` of `n` channels, the rest one."""
    g, is_of_head = gate
    return exp(load_beta(g, row, p, n, is_of_head))


def decay_at(gate, s_decay, i):
    """A vector of the decays kept, or None without a gate."""
    raise NotImplementedError('in compiled loops only')


@overload(decay_at)
def _(gate, s_decay, i):
    if isinstance(gate, types.NoneType):
        return lambda gate, s_decay, i: None
    return lambda gate, s_decay, i: load(s_decay, i)


@inlined
def decayed(b_s, b_decay):
    if b_decay is None:
        return b_s
    return product(b_s, b_decay)


@inlined
def diagonal_key(S, p_old, p_new, k, p_k, b_v, b_eps, b_decay):
    """Update the channels of one key by a token and return them."""
    b_k, b_s = load_one(k, p_k), decayed(load(S, p_old), b_decay)
    b_s = b_s + (b_k * b_eps) * (b_v - b_k * b_s)
    store(S, p_new, b_s)
    return b_s


@inlined
def diagonal_update(S, p_old, p_new, q, k, p_k, K, b_v, b_eps, b_decay):
    """Update the state by a token, from the tile at `p_old` to the one at `p_new`; returns `q^T S`.

    Partial sums of `KEYS` keys round less, and only one at a time takes registers, of which AVX2 has few.
    """
    b_o = splat(np.float32(0))
    for first in range(0, K, KEYS):
        b_part = splat(np.float32(0))
        for j in range(first, min(first + KEYS, K)):
            b_s = diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_eps, b_decay)
            b_part = b_part + load_one(q, p_k + j) * b_s
        b_o = b_o + b_part
    return b_o


@inlined
def diagonal_advance(S, p_old, p_new, k, p_k, K, b_v, b_eps, b_decay):
    """`diagonal_update` without the output."""
    for j in range(K):
        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_eps, b_decay)


@inlined
def read(S, p_s, k, p_k, K):
    """`k^T S`, summed as in :func:`exact_update`: the bits of a sequence do not depend on where it is cut."""
    b_x = splat(np.float32(0))
    for first in range(0, K, KEYS):
        b_part = splat(np.float32(0))
        for j in range(first, min(first + KEYS, K)):
            b_part = b_part + load_one(k, p_k + j) * load(S, p_s + j * W)
        b_x = b_x + b_part
    return b_x


@inlined
def exact_update(S, p_old, p_new, q, k, p_k, p_next, K, b_u, b_decay):
    """`diagonal_update` for the exact update, with `u = eps r`; also returns `k^T S` for the key at `p_next`."""
    b_o, b_x = splat(np.float32(0)), splat(np.float32(0))
    for first in range(0, K, KEYS):
        b_o_part, b_x_part = splat(np.float32(0)), splat(np.float32(0))
        for j in range(first, min(first + KEYS, K)):
            b_s = decayed(load(S, p_old + j * W), b_decay) + load_one(k, p_k + j) * b_u
            store(S, p_new + j * W, b_s)
            b_o_part, b_x_part = b_o_part + load_one(q, p_k + j) * b_s, b_x_part + load_one(k, p_next + j) * b_s
        b_o, b_x = b_o + b_o_part, b_x + b_x_part
    return b_o, b_x


@helper
def rows_ahead(p, p_z, v, beta, z, is_scalar):
    """Addresses to prefetch: v and beta at `p`, z at `p_z`; that of v in place of absent ones."""
    ahead = address_of(v, p)
    return ahead, ahead if is_scalar else address_of(beta, p), address_of(z, p_z) if len(z) > 0 else ahead


@helper
def forward_strip(t0, L, i_h, o_v, q, k, v, beta, gate, D, z, z_stride, o, H, K, V, exact, is_scalar, options, S, p_s,
                  tokens):
    """`W` channels of `L` tokens; `tokens` holds their `|k|^2` and buffers for eps, v and decays.

    Step sizes come first, so that no token waits for a division.
    """
    s_k2, s_eps, s_v, s_decay = tokens
    n = V - o_v
    for t in range(L):
        row = (t0 + t) * H + i_h
        b_eps, _ = step_size(load_beta(beta, row, row * V + o_v, n, is_scalar), s_k2[t], options)
        store(s_eps, t * W, b_eps)
        store(s_v, t * W, load_lanes(v, row * V + o_v, n))
        if gate is not None:
            store(s_decay, t * W, load_decay(gate, row, row * V + o_v, n))
    p = ((t0 + L) * H + i_h) * V + o_v
    ahead, beta_ahead, z_ahead = rows_ahead(p, (t0 + L) * z_stride + i_h * V + o_v, v, beta, z, is_scalar)
    row_bytes, z_bytes, written = H * V * v.itemsize, z_stride * v.itemsize, address_of(o, p - L * H * V)
    # the outputs are written over the step sizes, which are needed no more
    if exact:
        b_x = read(S, p_s, k, (t0 * H + i_h) * K, K)
        for t in range(L):
            prefetch(v, ahead + t * row_bytes)
            prefetch(v, beta_ahead + t * row_bytes)
            p_k, p_next = ((t0 + t) * H + i_h) * K, ((t0 + min(t + 1, L - 1)) * H + i_h) * K
            b_decay = decay_at(gate, s_decay, t * W)
            b_u = load(s_eps, t * W) * (load(s_v, t * W) - decayed(b_x, b_decay))
            b_o, b_x = exact_update(S, p_s, p_s, q, k, p_k, p_next, K, b_u, b_decay)
            store(s_eps, t * W, b_o)
            prefetch(v, z_ahead + t * z_bytes)
            prefetch_to_write(o, written + t * row_bytes)
    else:
        for t in range(L):
            prefetch(v, ahead + t * row_bytes)
            prefetch(v, beta_ahead + t * row_bytes)
            p_k = ((t0 + t) * H + i_h) * K
            b_v, b_eps, b_decay = load(s_v, t * W), load(s_eps, t * W), decay_at(gate, s_decay, t * W)
            store(s_eps, t * W, diagonal_update(S, p_s, p_s, q, k, p_k, K, b_v, b_eps, b_decay))
            prefetch(v, z_ahead + t * z_bytes)
            prefetch_to_write(o, written + t * row_bytes)
    for t in range(L):
        p = ((t0 + t) * H + i_h) * V + o_v
        b_o = load(s_eps, t * W)
        if len(D) > 0:
            b_o = b_o + load_lanes(D, i_h * V + o_v, n) * load(s_v, t * W)
        if len(z) > 0:
            b_z = load_lanes(z, (t0 + t) * z_stride + i_h * V + o_v, n)
            b_o = b_o * (b_z * sigmoid(b_z))
        store_lanes(o, p, b_o, n)


@inlined
def square_norms(t0, L, i_h, k, H, K, s_k2):
    for t in range(L):
        s_k2[t] = square_norm(k, ((t0 + t) * H + i_h) * K, K)


@helper
def forward_block(first, last, i_h, o_v, bos, eos, slot, q, k, v, beta, gate, h0, D, z, z_stride, o, ht, states, H, K, V, C,
                  BV, exact, is_scalar, options, S, tokens):
    """`BV` channels of one head of one sequence; `S` holds their tiles `[BV / W, K, W]`.

    `first` and `last` are the offsets of the initial state in `h0` and the final state in `ht`; -1 means zero, or no write.
    """
    channels = range(0, min(BV, V - o_v), W)
    p_h = i_h * K * V + o_v
    for i in channels:
        load_tile(h0, first + p_h + i, V, K, V - o_v - i if first >= 0 else 0, S, i * K)
    for t in range(bos, eos, STRIP):
        L = min(STRIP, eos - t)
        square_norms(t, L, i_h, k, H, K, tokens[0])
        if len(states) > 0 and (t - bos) % C == 0:
            p = ((slot + (t - bos) // C) * H + i_h) * K * V + o_v
            for i in channels:
                store_tile(states, p + i, V, K, V - o_v - i, S, i * K)
        for i in channels:
            forward_strip(t, L, i_h, o_v + i, q, k, v, beta, gate, D, z, z_stride, o, H, K, V, exact, is_scalar, options,
                          S, i * K, tokens)
    if last >= 0:
        for i in channels:
            store_tile(ht, last + p_h + i, V, K, V - o_v - i, S, i * K)


@helper
def first_slot(i_n, bos, eos, C, is_varlen):
    """First slot of a sequence in the saved states (`fla_longhorn.ops.checkpoints`)."""
    return bos // C + i_n if is_varlen else i_n * ((eos - bos + C - 1) // C)


@helper
def decay_buffer(gate, T):
    return np.empty(0 if gate is None else T * W, np.float32)


def gate_at(gate, N, H, V):
    """`gate` of N tokens, given the address of g."""
    raise NotImplementedError('in compiled loops only')


@overload(gate_at)
def _(gate, N, H, V):
    if isinstance(gate, types.NoneType):
        return lambda gate, N, H, V: None
    return lambda gate, N, H, V: (array_at(gate[0], N * H if gate[1] else N * H * V), gate[1])


@helper
def size_of(places, size):
    """Elements from the first state to the end of the last one."""
    return np.max(places) + size if len(places) > 0 else 0


@compiled
def forward(i_w, n_w, q, k, v, beta, gate, h0, D, z, z_stride, cu_seqlens, places, o, ht, states, NS, H, K, V, C, BV, exact,
            is_scalar, options, is_varlen, dtype):
    """One worker's blocks of forward, given addresses; a row of `places` is (sequence, `first`, `last`).

    `dtype` is that of v, beta, z and o; `states` has NS slots.
    """
    T, size = cu_seqlens[-1], H * K * V
    q, k, states = array_at(q, T * H * K), array_at(k, T * H * K), array_at(states, NS * size)
    v, o = array_at(v, T * H * V, dtype), array_at(o, T * H * V, dtype)
    beta, gate = array_at(beta, T * H if is_scalar else T * H * V, dtype), gate_at(gate, T, H, V)
    D, z = array_at(D, H * V if D != 0 else 0), array_at(z, (T - 1) * z_stride + H * V if z != 0 else 0, dtype)
    h0 = array_at(h0, size_of(places[:, 1], size) if h0 != 0 else 0)
    ht = array_at(ht, size_of(places[:, 2], size) if ht != 0 else 0)
    NV = (V + BV - 1) // BV
    S = np.empty(K * BV, np.float32)
    s_eps, s_v = np.empty(STRIP * W, np.float32), np.empty(STRIP * W, np.float32)
    tokens = np.empty(STRIP, np.float32), s_eps, s_v, decay_buffer(gate, STRIP)
    for block in range(i_w, len(places) * H * NV, n_w):
        i_p, i_h, i_v = block // (H * NV), block // NV % H, block % NV
        i_n, first, last = places[i_p, 0], places[i_p, 1], places[i_p, 2]
        bos, eos = cu_seqlens[i_n], cu_seqlens[i_n + 1]
        slot = first_slot(i_n, bos, eos, C, is_varlen)
        forward_block(first, last, i_h, i_v * BV, bos, eos, slot, q, k, v, beta, gate, h0, D, z, z_stride, o, ht, states, H, K,
                      V, C, BV, exact, is_scalar, options, S, tokens)


@helper
def step_tokens(q, k, v, beta, gate, D, z, z_stride, o, states, places, H, K, V, BV, exact, is_scalar, options):
    """`forward` of one token per sequence; the `states` at `places` are updated in place."""
    kept, S = array_at(0, 0), np.empty(K * BV, np.float32)
    tokens = np.empty(1, np.float32), np.empty(W, np.float32), np.empty(W, np.float32), decay_buffer(gate, 1)
    for i_p in range(len(places)):
        i_n, first, last = places[i_p, 0], places[i_p, 1], places[i_p, 2]
        for i_h in range(H):
            for o_v in range(0, V, BV):
                forward_block(first, last, i_h, o_v, i_n, i_n + 1, 0, q, k, v, beta, gate, states, D, z, z_stride, o, states,
                              kept, H, K, V, 1, BV, exact, is_scalar, options, S, tokens)
