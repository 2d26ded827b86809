"""A linear map with two outputs, whose backward does not concatenate their gradients."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_longhorn.modules.bare import is_bare
from fla_longhorn.ops.plain import ORDINARY, is_recorded


class SplitLinear(torch.autograd.Function):
    """`(x @ weight.T + bias).chunk(2, -1)`, whose backward multiplies each half's gradient by its half of the weight.

    Autograd would concatenate the gradients first, which reads and writes each of them once more.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias).chunk(2, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # the products have the dtype of forward, whatever autocast says now; meta tensors have no autocast
        known = torch.amp.is_autocast_available(x.device.type)
        with torch.autocast(x.device.type, enabled=False) if known else nullcontext():
            return SplitLinear.products(ctx, x, weight, *gradients)

    @staticmethod
    def products(ctx, x: Tensor, weight: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = ctx.needs_input_grad
        dx = dweight = dbias = None
        halves = [do.flatten(0, -2) for do in gradients]
        if of_x:
            first, second = weight.chunk(2)
            dx = torch.mm(halves[0], first).addmm_(halves[1], second).view(x.shape)
        if of_weight:
            dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            rows = x.flatten(0, -2)
            for do, out in zip(halves, dweight.chunk(2), strict=True):
                torch.mm(do.mT, rows, out=out)
        if of_bias:
            dbias = torch.cat([do.sum(0) for do in halves])
        return dx, dweight, dbias


def split_linear(linear: nn.Linear, x: Tensor) -> tuple[Tensor, ...]:
    """`linear(x).chunk(2, -1)`, by :class:`SplitLinear` if autograd records and `linear` is bare."""
    if not (is_recorded() and is_bare(linear, x.device) and type(x) in ORDINARY):
        return linear(x).chunk(2, dim=-1)
    args = x, linear.weight, linear.bias
    device_type = x.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        return SplitLinear.apply(*(y if y is None or y.dtype == torch.float64 else y.to(dtype) for y in args))
    return SplitLinear.apply(*args)
