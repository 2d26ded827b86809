"""The summaries of one sequence by the kernels of the diagonal update's segments."""

from __future__ import annotations

import triton
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.triton.common import launching
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.common import CHANNELS, prepare_rows


def forward_summary(args: Arguments) -> tuple[Tensor, Tensor]:
    """(decay, local), float32 `[1, H, K, V]`."""
    return summarize(args._replace(q=args.k, scale=1.0), None)


def backward_summary(do: Tensor, args: Arguments) -> Tensor:
    """The gradient of the state before the tokens, where none comes from behind them."""
    return summarize(args, do)[1]


def summarize(args: Arguments, do: Tensor | None) -> tuple[Tensor, Tensor]:
    """The summary of one sequence from those of its segments, in order; with `do`, of the gradient on its way back."""
    args = args._replace(state_v_first=False, cu_seqlens=None)
    _, T, H, K, V = args.sizes
    reverse, device = do is not None, args.q.device
    with launching(args):
        kq = prepare_rows(args)
        L = segments.choose_segment_length(T, H * triton.cdiv(V, CHANNELS), K, device)
        decay, local = segments.summarize_segments(kq, args, do, L=L)
        if len(decay) == 1:
            return decay, local
        bounds = segments.combine_segments(decay, local, None, args, L=L, reverse=reverse)
    last = slice(0, 1) if reverse else slice(-1, None)
    return decay.prod(0, keepdim=True), decay[last] * bounds[last] + local[last]
