"""The summaries of `ops/context_parallel/summaries.py`, of one sequence, by the segments' kernels."""

from __future__ import annotations

import triton
from fla.utils import custom_device_ctx
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.triton.common import with_token_stride
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.common import prepare_rows


def forward_summary(args: Arguments) -> tuple[Tensor, Tensor]:
    """(decay, local), float32 `[1, H, K, V]`."""
    v, s_v = with_token_stride(args.v)
    with custom_device_ctx(args.k.device.index):
        rows = prepare_rows(args.k, args.k, 1., squares=False)
        return summarize(args, rows, v, s_v, None, 0, reverse=False)


def backward_summary(do: Tensor, args: Arguments) -> Tensor:
    """The gradient of the state before the tokens, where none comes from behind them."""
    do, s_do = with_token_stride(do)
    z, s_z = (None, 0) if args.z is None else with_token_stride(args.z)
    with custom_device_ctx(args.q.device.index):
        rows = prepare_rows(args.q, args.k, args.scale, squares=True)
        return summarize(args, rows, do, s_do, z, s_z, reverse=True)[1]


def summarize(
    args: Arguments, rows: Tensor, x: Tensor, s_x: int, z: Tensor | None, s_z: int, *, reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The summary of one sequence from those of its segments, in order; `x` and `z` are `segments.summarize_segments`'s."""
    _, T, H, V = x.shape
    K = args.k.shape[-1]
    L = segments.choose_segment_length(T, H * triton.cdiv(V, 32), K, x.device)
    decay, local = segments.summarize_segments(
        rows, x, s_x, args.beta.contiguous(), z, s_z, None, K=K, L=L, reverse=reverse,
        use_beta_sigmoid=args.use_beta_sigmoid_in_kernel, state_v_first=False,
    )
    if len(decay) == 1:
        return decay, local
    bounds = segments.combine_segments(decay, local, None, None, N=1, T=T, L=L, reverse=reverse)
    last = slice(0, 1) if reverse else slice(-1, None)
    return decay.prod(0, keepdim=True), decay[last] * bounds[last] + local[last]
