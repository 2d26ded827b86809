"""The causal convolution of one rank's part of sequences that are split over several ranks (fla's `FLACPContext`).

An output depends on the W - 1 inputs before it. So the W - 1 tokens before a part are put in front of it, and their outputs
dropped. fla's own (`CausalConv1dFunctionCP`) runs in Triton alone and fails for parts shorter than W - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fla_longhorn.modules.convolution import ShortConvolution
from fla_longhorn.ops.context_parallel import all_gather

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


class TokensBefore(torch.autograd.Function):
    """The `count` tokens `[count, D]` before this rank's `x` `[T, D]`, zeros before the first; all ranks have T tokens."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, count: int, group: dist.ProcessGroup) -> torch.Tensor:
        T, D = x.shape
        ctx.shape, ctx.count, ctx.group = (T, D), count, group
        tails = all_gather(x[-min(T, count):], group)
        before = torch.cat([x.new_zeros(count, D), *tails[:dist.get_rank(group)]])
        return before[-count:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dbefore: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (T, D), count, rank = ctx.shape, ctx.count, dist.get_rank(ctx.group)
        m = min(T, count)
        dx = dbefore.new_zeros(T, D)
        dtail = dx[T - m:]
        for distance, later in enumerate(all_gather(dbefore, ctx.group)[rank + 1:], 1):
            # index of this rank's tail among the tokens that the later rank received
            first = count - distance * m
            if first > -m:
                dtail[max(-first, 0):] += later[max(first, 0):first + m]
        return dx, None, None


@torch.compiler.disable
def convolve_part(convolution: ShortConvolution, x: torch.Tensor, cp_context: FLACPContext) -> torch.Tensor:
    """Convolve this rank's part `x` `[1, T, D]`."""
    cu_seqlens, group, width = cp_context.cu_seqlens, cp_context.group, convolution.kernel_size[0]
    if group is None or width == 1:
        return convolution(x=x, cu_seqlens=cu_seqlens)[0]
    if cp_context.pre_num_conv_tokens is None:
        raise ValueError('cp_context must hold pre_num_conv_tokens, as build_cp_context makes it, got None')
    count = min(width - 1, cp_context.pre_num_conv_tokens)
    # a collective: ranks that need no token call it too
    before = TokensBefore.apply(x[0], width - 1, group)[width - 1 - count:]
    bounds = torch.cat([cu_seqlens[:1], cu_seqlens[1:] + count])
    return convolution(x=torch.cat([before, x[0]])[None], cu_seqlens=bounds)[0][:, count:]
