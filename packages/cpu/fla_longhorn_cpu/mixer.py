"""What a layer computes between its first and its last projection, for one token per sequence, as one loop.

It is made of those of `fla_cpu.loops` and the operator, and a product. In decoding, calling a convolution, two small products
and the recurrence takes several times as long as computing them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor
from torch.autograd.graph import increment_version

from fla_cpu.loops import TAPS, convolve_forward
from fla_cpu.loops import step as convolve_token
from fla_kit.numba import notice
from fla_kit.numba.arguments import FLOAT32, address
from fla_kit.numba.launch import MIN_PARALLEL_STEPS, compiled, in_rows
from fla_kit.numba.memory import (
    BITS,
    address_of,
    array_at,
    load_lanes,
    load_one,
    splat,
    store,
    store_lanes,
    store_one,
    sum_rows,
    widened,
)
from fla_kit.numba.simd import W, helper, sum_lanes
from fla_longhorn.ops.pool import Pool
from fla_longhorn_cpu import places
from fla_longhorn_cpu.forward import block_size, size_of, step_tokens

# of all sequences; more takes PyTorch less time, with several threads
MAX_PRODUCTS = 2**20


class Mixer(NamedTuple):
    """A layer of d channels in H heads, with K entries per channel and step sizes of rank R."""

    # the convolution's, `[d, 1, 4]` and `[d]`
    taps: Tensor
    conv_bias: Tensor | None
    # `[R + 2 H K, d]`, or `[R + H K, d]` if the queries are the keys
    x_weight: Tensor
    # `[d, R]` and `[d]`, or `[H, R]` and `[H]` for one step size per head
    beta_weight: Tensor
    beta_bias: Tensor
    # `[d]`
    D: Tensor
    num_heads: int
    state_size: int
    exact: bool
    allow_neg_eigval: bool
    # of the norm of the keys, or None without it
    key_eps: float | None
    # `down` `[R', d]`, `up` `[d, R']`, `A_log` `[H]` and `dt_bias` `[d]` of the layer's gate, or for one decay per head
    # `[H, R']` and `[H]`
    gate: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


@helper
def project(x, weight, bias, y, N, D, M):
    """`y = x weight^T + bias`, `x` `[N, D]`, `weight` `[M, D]`, `bias` `[M]` or empty. A row's bits depend on that row alone.

    Two rows at a time, so that a weight is read once for both, and four products of each.
    """
    products = np.empty(2 * W * W, np.float32)
    for n in range(0, N, 2):
        p, p_next = n * D, min(n + 1, N - 1) * D
        for first in range(0, M, W):
            for i in range(0, min(W, M - first), 4):
                # beyond the last row of the weight, that row again
                p0, p1 = (first + i) * D, min(first + i + 1, M - 1) * D
                p2, p3 = min(first + i + 2, M - 1) * D, min(first + i + 3, M - 1) * D
                b_0 = b_1 = b_2 = b_3 = b_4 = b_5 = b_6 = b_7 = splat(np.float32(0))
                for j in range(0, D, W):
                    b_x, b_y = load_lanes(x, p + j, D - j), load_lanes(x, p_next + j, D - j)
                    b_w = load_lanes(weight, p0 + j, D - j)
                    b_0, b_4 = b_0 + b_x * b_w, b_4 + b_y * b_w
                    b_w = load_lanes(weight, p1 + j, D - j)
                    b_1, b_5 = b_1 + b_x * b_w, b_5 + b_y * b_w
                    b_w = load_lanes(weight, p2 + j, D - j)
                    b_2, b_6 = b_2 + b_x * b_w, b_6 + b_y * b_w
                    b_w = load_lanes(weight, p3 + j, D - j)
                    b_3, b_7 = b_3 + b_x * b_w, b_7 + b_y * b_w
                store(products, i * W, b_0)
                store(products, (i + 1) * W, b_1)
                store(products, (i + 2) * W, b_2)
                store(products, (i + 3) * W, b_3)
                store(products, (W + i) * W, b_4)
                store(products, (W + i + 1) * W, b_5)
                store(products, (W + i + 2) * W, b_6)
                store(products, (W + i + 3) * W, b_7)
            b_bias = load_lanes(bias, first, M - first if len(bias) > 0 else 0)
            store_lanes(y, n * M + first, sum_rows(products, 0) + b_bias, M - first)
            if n + 1 < N:
                store_lanes(y, (n + 1) * M + first, sum_rows(products, W * W) + b_bias, M - first)


@helper
def normalise(k, N, K, eps):
    """`k / sqrt(|k|^2 + eps)` of N keys, in place."""
    for p in range(0, N * K, K):
        b_sum = splat(np.float32(0))
        for j in range(0, K, W):
            b_k = load_lanes(k, p + j, K - j)
            b_sum = b_sum + b_k * b_k
        factor = np.float32(1 / np.sqrt(sum_lanes(b_sum) + eps))
        for j in range(K):
            store_one(k, p + j, load_one(k, p + j) * factor)


def convolve(memory, x, stride, taps, bias, y, N, d, dtype, memory_dtype):
    """The convolution of a token per sequence, after the inputs in `memory`: pages of a pool, or a cache."""
    raise NotImplementedError('in compiled loops only')


@overload(convolve)
def _(memory, x, stride, taps, bias, y, N, d, dtype, memory_dtype):
    if isinstance(memory, types.BaseTuple):
        def in_pages(memory, x, stride, taps, bias, y, N, d, dtype, memory_dtype):
            pages, page_stride, named, bounds = memory
            convolve_forward(
                0, 1, x, stride, taps, bias, bounds, address_of(y, 0), d, pages, page_stride, named, True, dtype, dtype, dtype,
                memory_dtype,
            )
        return in_pages

    def in_cache(memory, x, stride, taps, bias, y, N, d, dtype, memory_dtype):
        rows, cache = array_at(x, N * stride, dtype), array_at(memory, N * d * TAPS, memory_dtype)
        for n in range(N):
            convolve_token(
                address_of(rows, n * stride), address_of(cache, n * d * TAPS), taps, bias, address_of(y, n * d), 1, d, TAPS,
                True, dtype, memory_dtype, dtype,
            )
    return in_cache


def decays(gate, v, N, d, H, dtype):
    """The gate's logarithms of decays, given addresses, and whether a head has one; None without a gate."""
    raise NotImplementedError('in compiled loops only')


@overload(decays)
def _(gate, v, N, d, H, dtype):
    if isinstance(gate, types.NoneType):
        return lambda gate, v, N, d, H, dtype: None

    def computed(gate, v, N, d, H, dtype):
        down, up, A_log, dt_bias, R, is_of_head = gate
        M, none = H if is_of_head else d, array_at(0, 0)
        b, projected, g = np.empty(N * R, dtype), np.empty(N * M, dtype), np.empty(N * M, np.float32)
        project(v, array_at(down, R * d, dtype), none, b, N, d, R)
        project(b, array_at(up, M * R, dtype), none, projected, N, R, M)
        A_log, dt_bias = array_at(A_log, H, dtype), array_at(dt_bias, M, dtype)
        for p in range(N * M):
            x = load_one(projected, p) + load_one(dt_bias, p % M)
            softplus = max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
            g[p] = -np.exp(load_one(A_log, p % M // (M // H))) * softplus
        return g, is_of_head
    return computed


@compiled
def mix(x, z, stride, memory, taps, conv_bias, x_weight, beta_weight, beta_bias, D, gate, o, states, where, N, R, H, K, V,
        BV, is_tied, is_scalar, exact, normalises_keys, eps, options, dtype, memory_dtype):
    """`o` `[N, H V]` from the rows of x and z, `stride` apart, given addresses; memories and states are updated in place."""
    d, M, none = H * V, H if is_scalar else H * V, array_at(0, 0)
    v, beta = np.empty(N * d, dtype), np.empty(N * M, dtype)
    b, k, q = np.empty(N * R, dtype), np.empty(N * H * K, dtype), np.empty(N * H * K, dtype)
    convolve(memory, x, stride, taps, conv_bias, v, N, d, dtype, memory_dtype)
    weight = array_at(x_weight, (R + (1 if is_tied else 2) * H * K) * d, dtype)
    project(v, weight, none, b, N, d, R)
    project(v, weight[R * d:], none, k, N, d, H * K)
    if is_tied:
        q[:] = k
    else:
        project(v, weight[(R + H * K) * d:], none, q, N, d, H * K)
    if normalises_keys:
        normalise(k, N * H, K, eps)
    project(b, array_at(beta_weight, M * R, dtype), array_at(beta_bias, M, dtype), beta, N, R, M)
    states = array_at(states, size_of(where, H * K * V))
    step_tokens(
        widened(q), widened(k), v, beta, decays(gate, v, N, d, H, dtype), array_at(D, d, dtype),
        array_at(z, (N - 1) * stride + d, dtype), stride, array_at(o, N * d, dtype), states, where, H, K, V, BV, exact,
        is_scalar, options,
    )


@lru_cache(maxsize=64)
def named_rows(*choices: Any) -> np.ndarray:
    """Of :func:`fla_longhorn_cpu.places.rows_in_pool`: the rows to read, then those to write. Do not write to it."""
    rows = places.checked_rows(*choices)
    return np.array([row[0] for row in rows] + [row[1] for row in rows], np.int64)


def mix_tokens(x: Tensor, z: Tensor, mixer: Mixer, memory: Tensor, pool: Pool) -> Tensor | None:
    """None where the loop does not take the call."""
    N, d, H, K, states = x.shape[0], x.shape[-1], mixer.num_heads, mixer.state_size, pool.states
    is_paged, num_rows, (M, R) = pool.is_chosen_from, mixer.x_weight.shape[0], mixer.beta_weight.shape
    if d % W or N == 0 or pool.has_initial_state is not None:
        return None
    if num_rows - R not in (H * K, 2 * H * K) or M not in (H, d):
        return None
    products = mixer.x_weight.numel() + mixer.beta_weight.numel()
    if mixer.gate is not None:
        products += mixer.gate[0].numel() + mixer.gate[1].numel()
    if N * products > MAX_PRODUCTS or N * d * K >= MIN_PARALLEL_STEPS:
        return None
    row, dtypes, o = x.shape if x.dim() == 2 else (N, 1, d), (x.dtype,), torch.empty(x.shape, dtype=x.dtype, device='cpu')
    P = states.shape[0]
    pages = (P, TAPS - 1, d), (P, H, K, d // H)
    past, kept = pages if is_paged else ((N, d, TAPS), (N, *pages[1][1:]))
    try:
        given: Any = (
            address('x', x, row, stride=x.stride(0)),
            address('z', z, row, dtypes, stride=x.stride(0)),
            x.stride(0),
            address('memory', memory, past, stride=memory.stride(0) if is_paged else None),
            address('taps', mixer.taps, (d, 1, TAPS), dtypes),
            address('conv_bias', mixer.conv_bias, (d,), dtypes, optional=True),
            address('x_weight', mixer.x_weight, (num_rows, d), dtypes),
            address('beta_weight', mixer.beta_weight, (M, R), dtypes),
            address('beta_bias', mixer.beta_bias, (M,), dtypes),
            address('D', mixer.D, (d,), dtypes),
            None if mixer.gate is None else gate_of(*mixer.gate, H, d, dtypes),
            address('o', o, row, dtypes),
            address('states', states, kept, FLOAT32, stride=states.stride(0)),
        )
    except ValueError:
        # another dtype or layout
        return None
    if is_paged:
        rows = places.rows_in_pool(pool, N)
        where = places.place_rows(states.stride(0), *rows)
        given = *given[:3], (given[3], memory.stride(0), named_rows(*rows), in_rows(N, 1)), *given[4:]
    else:
        where = places.in_order(N, states.stride(0), True, True)
    if len(where) < N:
        # sequences without a row have outputs of zero
        o.zero_()
    for changed in (memory, states):
        if not changed.is_inference():
            increment_version(changed)
    notice.call(
        mix, *given, where, N, R, H, K, d // H, block_size(K, 1), num_rows == R + H * K, M == H, mixer.exact,
        mixer.key_eps is not None, mixer.key_eps or 0.0, (True, mixer.allow_neg_eigval), BITS[x.dtype], BITS[memory.dtype],
    )
    return o


def gate_of(
    down: Tensor, up: Tensor, A_log: Tensor, dt_bias: Tensor, H: int, d: int, dtypes: tuple[torch.dtype],
) -> tuple[int, int, int, int, int, bool]:
    """What :func:`decays` takes."""
    M, R = up.shape
    if M not in (H, d):
        raise ValueError(f'up must have {H} or {d} rows, got {M}')
    return (
        address('down', down, (R, d), dtypes),
        address('up', up, (M, R), dtypes),
        address('A_log', A_log, (H,), dtypes),
        address('dt_bias', dt_bias, (M,), dtypes),
        R, M == H,
    )
