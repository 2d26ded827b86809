"""RMS norm and the convolution as one loop each, compiled by Numba.

In decoding, the overhead of each PyTorch call exceeds its computation. In training the convolution is limited by memory
bandwidth: a loop passes over memory once, PyTorch once per tap. :func:`fla_cpu.backend.load_loops` selects the calls that come
here. The loops take addresses of dense float32 or bfloat16 tensors (0 for an absent one), which are cheaper to pass than NumPy
arrays, and compute in float32.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.autograd.graph import increment_version

from fla_kit.numba import notice
from fla_kit.numba.arguments import FLOAT32, address
from fla_kit.numba.launch import boundaries, compiled, launch
from fla_kit.numba.memory import (
    BITS,
    address_of,
    array_at,
    load,
    load_columns,
    load_lanes,
    load_one,
    prefetch,
    prefetch_to_write,
    splat,
    store,
    store_columns,
    store_lanes,
    store_one,
)
from fla_kit.numba.simd import W, helper, inlined, sigmoid, sum_lanes

# taps of the convolution; channels per worker and step; tokens whose gradients are summed in float32 before float64; tokens by
# which a row is prefetched before it is written
TAPS, BD, STRIP, FEW = 4, 128, 64, 4
NO_PAGES = np.empty(0, np.int64)


@compiled
def normalise(i_w, n_w, x, weight, y, rstd, T, D, eps, x_bits, weight_bits, y_bits):
    """One worker's rows of `y = x * rstd * weight`, `x` `[T, D]`; writes `rstd = 1 / sqrt(mean(x^2) + eps)` if given."""
    x, y, rstd = array_at(x, T * D, x_bits), array_at(y, T * D, y_bits), array_at(rstd, T if rstd != 0 else 0)
    weight = array_at(weight, D if weight != 0 else 0, weight_bits)
    for t in range(i_w, T, n_w):
        p = t * D
        b_sum = splat(np.float32(0))
        for j in range(0, D, W):
            b_x = load_lanes(x, p + j, D - j)
            b_sum = b_sum + b_x * b_x
        factor = np.float32(1 / math.sqrt(sum_lanes(b_sum) / D + eps))
        if len(rstd) > 0:
            rstd[t] = factor
        b_rstd = splat(factor)
        for j in range(0, D, W):
            b_y = load_lanes(x, p + j, D - j) * b_rstd
            if len(weight) > 0:
                b_y = b_y * load_lanes(weight, j, D - j)
            store_lanes(y, p + j, b_y, D - j)


@compiled
def step(x, cache, weight, bias, y, N, D, width, swish, bits, cache_bits, weight_bits):
    """Append one token to `cache` `[N, D, width]`, the newest input in the last column, and convolve: `y` `[N, D]`."""
    x, y, cache = array_at(x, N * D, bits), array_at(y, N * D, bits), array_at(cache, N * D * width, cache_bits)
    weight, bias = array_at(weight, D * width, weight_bits), array_at(bias, D if bias != 0 else 0, weight_bits)
    # kernels of four taps: the columns of as many channels as a vector has lanes
    together = D - D % W if width == TAPS else 0
    totals = np.empty(D - together, np.float32)
    for i in range(0, N * D, D):
        for d in range(0, together, W):
            _, b_x3, b_x2, b_x1 = load_columns(cache, (i + d) * TAPS)
            b_w3, b_w2, b_w1, b_w0 = load_columns(weight, d * TAPS)
            b_x = load(x, i + d)
            store_columns(cache, (i + d) * TAPS, (b_x3, b_x2, b_x1, b_x))
            # sums have the order of `convolve_forward`: a token has the same bits in both
            b_z = load_lanes(bias, d, W if len(bias) > 0 else 0) + b_w0 * b_x + b_w1 * b_x1 + b_w2 * b_x2 + b_w3 * b_x3
            store(y, i + d, b_z * sigmoid(b_z) if swish else b_z)
        for d in range(together, D):
            p, total = (i + d) * width, np.float32(0)
            for j in range(width - 1):
                cache[p + j] = cache[p + j + 1]
                total += load_one(cache, p + j) * load_one(weight, d * width + j)
            newest = load_one(x, i + d)
            store_one(cache, p + width - 1, newest)
            total += newest * load_one(weight, d * width + width - 1)
            if len(bias) > 0:
                total += load_one(bias, d)
            totals[d - together] = total
        for d in range(together, D, W):
            b_z = load_lanes(totals, d - together, D - d)
            store_lanes(y, i + d, b_z * sigmoid(b_z) if swish else b_z, D - d)


@inlined
def rows_before(x, p, stride, exist):
    """The vectors of three rows before the one at `p`, the newest first; zeros where none exist."""
    n = W if exist else 0
    return load_lanes(x, p - stride, n), load_lanes(x, p - 2 * stride, n), load_lanes(x, p - 3 * stride, n)


@helper
def rows_ahead(x, stride, t0, d, first, stop, eos):
    """The address to prefetch the next vector's rows from: the channels after those at `d`, or the next strip."""
    if d + W < stop:
        return address_of(x, t0 * stride + d + W)
    return address_of(x, min(t0 + STRIP, eos - 1) * stride + first)


@compiled
def convolve_forward(
    i_w, n_w, x, stride, weight, bias, bounds, y, D, pages, page_stride, named, swish,
    x_bits, weight_bits, y_bits, pages_bits,
):
    """Rows `[D]` of `x`, `stride` apart, into rows of `y` `[T, D]`; sequence n is rows `bounds[n]` to `bounds[n + 1]`.

    A page `[3, D]` of a pool has the last inputs, the newest last. Those before sequence n are read from page `named[n]`,
    those at its end written to page `named[N + n]`. A negative number, or none, is no page: zeros.
    """
    x, y = array_at(x, (bounds[-1] - 1) * stride + D, x_bits), array_at(y, bounds[-1] * D, y_bits)
    weight, bias = array_at(weight, D * TAPS, weight_bits), array_at(bias, D if bias != 0 else 0, weight_bits)
    N, paged, last = len(bounds) - 1, len(named) > 0, -1
    for page in named:
        last = max(last, page)
    pages = array_at(pages, last * page_stride + (TAPS - 1) * D if last >= 0 else 0, pages_bits)
    for first in range(i_w * BD, D, n_w * BD):
        stop = min(first + BD, D)
        for i_n in range(N):
            bos, eos = bounds[i_n], bounds[i_n + 1]
            before, after = named[i_n] if paged else -1, named[N + i_n] if paged else -1
            for t0 in range(bos, eos, STRIP):
                for d in range(first, stop, W):
                    ahead, written = rows_ahead(x, stride, t0, d, first, stop, eos), address_of(y, (t0 + FEW) * D + d)
                    b_w3, b_w2, b_w1, b_w0 = load_columns(weight, d * TAPS)
                    b_bias = load_lanes(bias, d, W if len(bias) > 0 else 0)
                    if t0 > bos:
                        p = t0 * stride + d
                        b_x1, b_x2, b_x3 = load(x, p - stride), load(x, p - 2 * stride), load(x, p - 3 * stride)
                    elif before >= 0:
                        p = before * page_stride + d
                        b_x1, b_x2, b_x3 = load(pages, p + 2 * D), load(pages, p + D), load(pages, p)
                    else:
                        b_x1 = b_x2 = b_x3 = splat(np.float32(0))
                    for t in range(t0, min(t0 + STRIP, eos)):
                        prefetch(x, ahead + (t - t0) * stride * x.itemsize)
                        prefetch_to_write(y, written + (t - t0) * D * y.itemsize)
                        b_x = load(x, t * stride + d)
                        b_z = b_bias + b_w0 * b_x + b_w1 * b_x1 + b_w2 * b_x2 + b_w3 * b_x3
                        store(y, t * D + d, b_z * sigmoid(b_z) if swish else b_z)
                        b_x1, b_x2, b_x3 = b_x, b_x1, b_x2
                    # the last strip's stay
                    if after >= 0:
                        p = after * page_stride + d
                        store(pages, p, b_x3)
                        store(pages, p + D, b_x2)
                        store(pages, p + 2 * D, b_x1)


@compiled
def convolve_backward(i_w, n_w, x, stride, dy, dy_stride, weight, bias, bounds, dx, dtaps, dbias, D, swish, x_bits, dy_bits):
    """Gradients of `x` `[T, D]`, `weight` (as `dtaps` `[4, D]`) and `bias` `[D]`; with `swish` its argument is recomputed."""
    x, dx = array_at(x, (bounds[-1] - 1) * stride + D, x_bits), array_at(dx, bounds[-1] * D, x_bits)
    dy = array_at(dy, (bounds[-1] - 1) * dy_stride + D, dy_bits)
    weight, dtaps = array_at(weight, D * TAPS), array_at(dtaps, TAPS * D)
    bias, dbias = array_at(bias, D if bias != 0 else 0), array_at(dbias, D)
    b_one, zero = splat(np.float32(1)), splat(np.float32(0))
    # contributions of a strip's tokens to the gradients of the three rows before the next strip, newest first
    carried = np.empty(3 * BD, np.float32)
    # gradients of the taps, newest first, then of the bias
    sums, totals = np.empty((TAPS + 1) * W, np.float32), np.empty((TAPS + 1) * BD, np.float64)
    for first in range(i_w * BD, D, n_w * BD):
        stop = min(first + BD, D)
        totals[:] = 0
        for i_n in range(len(bounds) - 1):
            bos, eos = bounds[i_n], bounds[i_n + 1]
            for t0 in range(bos, eos, STRIP):
                t1 = min(t0 + STRIP, eos)
                for d in range(first, stop, W):
                    ahead, written = rows_ahead(x, stride, t0, d, first, stop, eos), address_of(dx, (t0 + FEW) * D + d)
                    dy_ahead = rows_ahead(dy, dy_stride, t0, d, first, stop, eos)
                    b_w3, b_w2, b_w1, b_w0 = load_columns(weight, d * TAPS)
                    b_bias = load_lanes(bias, d, W if len(bias) > 0 else 0)
                    b_x1, b_x2, b_x3 = rows_before(x, t0 * stride + d, stride, t0 > bos)
                    b_dx1, b_dx2, b_dx3 = rows_before(carried, 3 * BD + d - first, BD, t0 > bos)
                    b_s0, b_s1, b_s2, b_s3, b_sum = zero, zero, zero, zero, zero
                    for t in range(t0, t1):
                        prefetch(x, ahead + (t - t0) * stride * x.itemsize)
                        prefetch(dy, dy_ahead + (t - t0) * dy_stride * dy.itemsize)
                        prefetch_to_write(dx, written + (t - t0) * D * dx.itemsize)
                        b_x, b_dz = load(x, t * stride + d), load(dy, t * dy_stride + d)
                        if swish:
                            b_z = b_bias + b_w0 * b_x + b_w1 * b_x1 + b_w2 * b_x2 + b_w3 * b_x3
                            b_gate = sigmoid(b_z)
                            b_dz = b_dz * b_gate * (b_one + b_z * (b_one - b_gate))
                        if t >= bos + 3:
                            store(dx, (t - 3) * D + d, b_dx3 + b_w3 * b_dz)
                        b_dx1, b_dx2, b_dx3 = b_w0 * b_dz, b_dx1 + b_w1 * b_dz, b_dx2 + b_w2 * b_dz
                        b_s0, b_s1, b_s2, b_s3 = b_s0 + b_dz * b_x, b_s1 + b_dz * b_x1, b_s2 + b_dz * b_x2, b_s3 + b_dz * b_x3
                        b_sum = b_sum + b_dz
                        b_x1, b_x2, b_x3 = b_x, b_x1, b_x2
                    if t1 < eos:
                        store(carried, 2 * BD + d - first, b_dx1)
                        store(carried, BD + d - first, b_dx2)
                        store(carried, d - first, b_dx3)
                    else:
                        store(dx, (t1 - 1) * D + d, b_dx1)
                        if t1 >= bos + 2:
                            store(dx, (t1 - 2) * D + d, b_dx2)
                        if t1 >= bos + 3:
                            store(dx, (t1 - 3) * D + d, b_dx3)
                    store(sums, 0, b_s0)
                    store(sums, W, b_s1)
                    store(sums, 2 * W, b_s2)
                    store(sums, 3 * W, b_s3)
                    store(sums, 4 * W, b_sum)
                    for i in range(TAPS + 1):
                        for j in range(W):
                            totals[i * BD + d - first + j] += sums[i * W + j]
        for d in range(first, stop):
            for i in range(TAPS):
                dtaps[(TAPS - 1 - i) * D + d] = totals[i * BD + d - first]
            dbias[d] = totals[TAPS * BD + d - first]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
    rstd: torch.Tensor | None = None,
) -> torch.Tensor:
    """The normalised rows of `x` `[..., D]`, in `dtype` or that of `x`; their inverse deviations go to `rstd` `[T]`."""
    y, T, D = torch.empty_like(x, dtype=dtype), x.shape[:-1].numel(), x.shape[-1]
    launch(
        normalise, T * D, T,
        address('x', x, x.shape),
        address('weight', weight, (D,), optional=True),
        address('y', y, x.shape),
        address('rstd', rstd, (T,), FLOAT32, optional=True),
        T, D, eps,
        BITS[x.dtype], BITS[x.dtype if weight is None else weight.dtype], BITS[y.dtype],
    )
    return y


def convolve_token(
    x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, swish: bool,
) -> torch.Tensor:
    """The outputs, `[N, D]` or `[N, 1, D]` like `x`, of one token per sequence; updates `cache` `[N, D, W]` in place.

    `weight` `[D, W]` or `[D, 1, W]` and `bias` `[D]` are dense.
    """
    D, width = weight.shape[0], weight.shape[-1]
    x, N = x.contiguous(), x.shape[:-1].numel()
    if bias is not None and bias.dtype is not weight.dtype:
        bias = bias.to(weight.dtype)
    y = torch.empty_like(x)
    notice.call(
        step,
        address('x', x, (*x.shape[:-1], D)),
        address('cache', cache, (N, D, width)),
        address('weight', weight, (D, 1, width) if weight.dim() == 3 else (D, width)),
        address('bias', bias, (D,), optional=True),
        address('y', y, x.shape, (x.dtype,)),
        N, D, width, swish,
        BITS[x.dtype], BITS[cache.dtype], BITS[weight.dtype],
    )
    if not cache.is_inference():
        increment_version(cache)
    return y


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None, swish: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The outputs `[B, T, D]`, in `dtype` or that of `x`, for `x` `[B, T, D]`, `weight` `[D, 4]` and no initial state."""
    B, T, D = x.shape
    y = x.new_empty(B, T, D, dtype=dtype)
    launch_forward(rows_of(x), weight.contiguous(), bias, boundaries(B, T, cu_seqlens), y.view(B * T, D), swish)
    return y


def convolve_in_pages(
    x: torch.Tensor, pages: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, swish: bool,
    first_pages: list[int], last_pages: list[int], cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The outputs `[T, D]` of sequences, of one token each unless `cu_seqlens` `[N + 1]` has their boundaries in `x` `[T, D]`.

    `pages` `[P, 3, D]` has last inputs, the newest last. Sequence n follows those in page `first_pages[n]`, zeros if that is
    negative; its own go to page `last_pages[n]` if that is not and it is not empty. `weight` is `[D, 4]`, D whole vectors.
    """
    T, D = x.shape
    bounds, y = boundaries(T, 1, cu_seqlens), torch.empty((T, D), dtype=x.dtype, device='cpu')
    N, named = len(bounds) - 1, first_pages + last_pages
    if len(first_pages) != N or len(last_pages) != N or max(named, default=-1) >= len(pages):
        raise ValueError(f'first_pages and last_pages must name one of {len(pages)} pages, or a negative number, for each of '
                         f'{N} sequences, got {first_pages} and {last_pages}')
    launch_forward(
        x if x.stride(1) == 1 else x.contiguous(), weight, bias, bounds, y, swish, pages, np.array(named, np.int64),
    )
    if not pages.is_inference():
        increment_version(pages)
    return y


def launch_forward(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bounds: np.ndarray, y: torch.Tensor, swish: bool,
    pages: torch.Tensor | None = None, named: np.ndarray = NO_PAGES,
) -> None:
    """:func:`convolve_forward` from `rows` `[T, D]`, any stride apart, to `y` `[T, D]`."""
    T, D = whole_vectors(rows)
    if bias is not None:
        bias = bias.to(weight.dtype).contiguous()
    stride, page_stride = rows.stride(0), 0 if pages is None else pages.stride(0)
    launch(
        convolve_forward, TAPS * T * D, -(-D // BD),
        address('x', rows, (T, D), stride=stride), stride,
        address('weight', weight, (D, TAPS)),
        address('bias', bias, (D,), optional=True),
        bounds,
        address('y', y, (T, D)), D,
        0 if pages is None else address('pages', pages, (len(pages), TAPS - 1, D), stride=page_stride), page_stride, named,
        swish, *bits_of(rows, weight, y, y if pages is None else pages),
    )


def convolve_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    swish: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `x`, `weight` and a bias, float32 both, given the gradient `dy` `[B, T, D]` of `convolve`'s output."""
    B, T, D = x.shape
    weight, bias = weight.contiguous(), None if bias is None else bias.float().contiguous()
    rows, drows, dx = rows_of(x), rows_of(dy), x.new_empty(B, T, D)
    dtaps, dbias = weight.new_empty(TAPS, D), weight.new_empty(D)
    whole_vectors(rows)
    launch(
        convolve_backward, TAPS * dx.numel(), -(-D // BD),
        address('x', rows, (B * T, D), stride=rows.stride(0)), rows.stride(0),
        address('dy', drows, (B * T, D), stride=drows.stride(0)), drows.stride(0),
        address('weight', weight, (D, TAPS), FLOAT32),
        address('bias', bias, (D,), FLOAT32, optional=True),
        boundaries(B, T, cu_seqlens),
        address('dx', dx, x.shape, (x.dtype,)),
        address('dtaps', dtaps, (TAPS, D), FLOAT32),
        address('dbias', dbias, (D,), FLOAT32),
        D, swish, *bits_of(rows, drows),
    )
    return dx, dtaps.t(), dbias


def whole_vectors(rows: torch.Tensor) -> tuple[int, int]:
    """The shape `[T, D]`; the convolution's loops mask no channels."""
    T, D = rows.shape
    if D % W:
        raise ValueError(f'x must have a multiple of {W} channels, got {D}')
    return T, D


def convolves(x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
    """Whether the loops support these sizes: four taps, whole vectors of channels, every row in a sequence."""
    if x.numel() == 0 or x.shape[-1] % W > 0 or weight.shape[-1] != TAPS:
        return False
    if cu_seqlens is None:
        return True
    covered = x.shape[0] == 1 and int(cu_seqlens[0]) == 0 and int(cu_seqlens[-1]) == x.shape[1]
    return covered and bool((cu_seqlens.diff() >= 0).all())


def has_pages(x: torch.Tensor, pages: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether :func:`convolve_in_pages` supports these: four taps, whole vectors of channels, dense pages and parameters."""
    D = x.shape[-1]
    return (
        D % W == 0 and pages.stride()[1:] == (D, 1) and pages.dtype in BITS
        and weight.shape == (D, TAPS) and weight.is_contiguous()
        and (bias is None or (bias.shape == (D,) and bias.is_contiguous() and bias.dtype is weight.dtype))
    )


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` `[B, T, D]` as `[B * T, D]` with dense rows that do not overlap; copied only if they are not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] else rows.contiguous()


def bits_of(*tensors: torch.Tensor) -> tuple[np.dtype, ...]:
    return tuple(BITS[x.dtype] for x in tensors)
