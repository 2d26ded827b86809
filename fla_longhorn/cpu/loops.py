"""RMS norm and the convolution's step as one loop each, compiled by Numba.

A decoding step computes little, and each function of PyTorch takes microseconds, however few elements it is called for.
:func:`fla_longhorn.cpu.backend.load_loops` says which calls come here. The loops take the addresses of dense float32 tensors
(0 for an absent one), which cost less to hand over than NumPy's arrays.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.autograd.graph import increment_version

from fla_longhorn.ops.numba import launch, notice
from fla_longhorn.ops.numba.forward import compiled, sigmoid
from fla_longhorn.ops.numba.simd import W, array_at, load_lanes, splat, store_lanes, sum_lanes


@compiled
def normalise(i_w, n_w, x, weight, y, rstd, T, D, eps):
    """One worker's rows of `y = x / sqrt(mean(x^2) + eps) * weight`, `x` `[T, D]`."""
    x, y, rstd = array_at(x, T * D), array_at(y, T * D), array_at(rstd, T)
    weight = array_at(weight, D if weight != 0 else 0)
    for t in range(i_w, T, n_w):
        p = t * D
        b_sum = splat(np.float32(0))
        for j in range(0, D, W):
            b_x = load_lanes(x, p + j, D - j)
            b_sum = b_sum + b_x * b_x
        rstd[t] = np.float32(1 / math.sqrt(sum_lanes(b_sum) / D + eps))
        b_rstd = splat(rstd[t])
        for j in range(0, D, W):
            b_y = load_lanes(x, p + j, D - j) * b_rstd
            if len(weight) > 0:
                b_y = b_y * load_lanes(weight, j, D - j)
            store_lanes(y, p + j, b_y, D - j)


@compiled
def step(x, cache, weight, bias, y, N, D, width, swish):
    """Take one token into `cache` `[N, D, width]`, the newest input in the last column, and convolve: `y` `[N, D]`."""
    x, y, cache, weight = array_at(x, N * D), array_at(y, N * D), array_at(cache, N * D * width), array_at(weight, D * width)
    bias = array_at(bias, D if bias != 0 else 0)
    for i in range(0, N * D, D):
        for d in range(D):
            p = (i + d) * width
            total = np.float32(0)
            for j in range(width - 1):
                cache[p + j] = cache[p + j + 1]
                total += cache[p + j] * weight[d * width + j]
            cache[p + width - 1] = x[i + d]
            total += x[i + d] * weight[d * width + width - 1]
            if len(bias) > 0:
                total += bias[d]
            y[i + d] = total
        if swish:
            for d in range(0, D, W):
                b_y = load_lanes(y, i + d, D - d)
                store_lanes(y, i + d, b_y * sigmoid(b_y), D - d)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows of `x` `[T, D]`, and their inverse deviations `[T]`."""
    T, D = x.shape
    if weight is not None and weight.shape != (D,):
        raise ValueError(f'weight must have shape [{D}], the width of x, got {list(weight.shape)}')
    y, rstd = x.new_empty(T, D), x.new_empty(T)
    launch(
        normalise, T * D, T,
        x.data_ptr(), address(weight), y.data_ptr(), rstd.data_ptr(), T, D, eps,
    )
    return y, rstd


def convolve_token(
    x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, swish: bool,
) -> torch.Tensor:
    """The outputs `[N, D]` of one token a sequence, `x` `[N, D]`; `cache` `[N, D, W]` is updated in place."""
    (N, D), width = x.shape, weight.shape[1]
    if not x.is_cpu or cache.shape != (N, D, width):
        raise ValueError(f'cache must have shape {[N, D, width]} for x on the CPU, got {list(cache.shape)} and {x.device}')
    x, y = x.contiguous(), x.new_empty(N, D)
    notice.call(
        step, x.data_ptr(), cache.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr(), N, D, width, swish,
    )
    if not cache.is_inference():
        increment_version(cache)
    return y


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
