"""What tokens of the diagonal update do to any state that enters them: `decay * state + local`, elementwise.

Of one sequence `[1, T, H, *]`; results are float32 `[1, H, K, V]`. Triton has kernels for it
(:mod:`fla_longhorn.ops.triton.diagonal.segments`). With any other backend the operator itself tells: `local` is what becomes
of a state of zeros, and `decay` of one of ones where all values are zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from fla.utils import custom_device_ctx
from torch import Tensor

from fla_longhorn.ops.backend import OP_BACKENDS, select_backend
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.operator import longhorn_bwd, longhorn_fwd
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.common import prepare_rows, with_token_stride


def runs_on_triton(device: torch.device) -> bool:
    return select_backend(device).__name__ == OP_BACKENDS['triton']


def forward_summary(
    k: Tensor, v: Tensor, beta: Tensor, *, with_decay: bool, use_beta_sigmoid: bool,
) -> tuple[Tensor | None, Tensor]:
    """(decay, local), or (None, local) where nobody asks for the decay."""
    if runs_on_triton(k.device):
        v, s_v = with_token_stride(v)
        with custom_device_ctx(k.device.index):
            rows = prepare_rows(k, k, 1., squares=False)
            return summarize(rows, v, s_v, beta, None, 0, K=k.shape[-1], reverse=False, use_beta_sigmoid=use_beta_sigmoid)
    h0 = None
    if with_decay:
        zeros = k.new_zeros(1, *k.shape[2:], v.shape[-1], dtype=torch.float32)
        h0 = torch.cat([zeros, zeros + 1])
        k, beta = (x.repeat_interleave(2, 0) for x in (k, beta))
        v = F.pad(v, (0, 0) * 3 + (0, 1))
    _, state, _ = longhorn_fwd(
        k, k, v, beta, 1.0, h0, None, None, None, False, use_beta_sigmoid, False, True, False, True,
    )
    return (state[1:], state[:1]) if with_decay else (None, state)


def backward_summary(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, z: Tensor | None, states: Tensor, *, scale: float,
    use_beta_sigmoid: bool, parallel: bool,
) -> Tensor:
    """The gradient of the state before the tokens, where none comes from behind them; `states` as the forward saved them."""
    T, K = q.shape[1], q.shape[-1]
    if runs_on_triton(q.device):
        do, s_do = with_token_stride(do)
        z, s_z = (None, 0) if z is None else with_token_stride(z)
        with custom_device_ctx(q.device.index):
            rows = prepare_rows(q, k, scale, squares=False)
            return summarize(rows, do, s_do, beta, z, s_z, K=K, reverse=True, use_beta_sigmoid=use_beta_sigmoid)[1]
    states = states[:num_checkpoints(1, T, 1, checkpoint_interval(K), False)]
    return longhorn_bwd(
        do, None, q, k, v, beta, scale, states[:1], None, z, None, states, False, use_beta_sigmoid, False, parallel,
    )[4]


def summarize(
    rows: Tensor, x: Tensor, s_x: int, beta: Tensor, z: Tensor | None, s_z: int, *, K: int, reverse: bool,
    use_beta_sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """Those of one sequence from those of its segments, in order; the arguments are `segments.summarize_segments`'s."""
    _, T, H, V = x.shape
    L = segments.choose_segment_length(T, H * triton.cdiv(V, 32), K, x.device)
    decay, local = segments.summarize_segments(
        rows, x, s_x, beta.contiguous(), z, s_z, None, K=K, L=L, reverse=reverse, use_beta_sigmoid=use_beta_sigmoid,
        state_v_first=False,
    )
    if len(decay) == 1:
        return decay, local
    bounds = segments.combine_segments(decay, local, None, None, N=1, T=T, L=L, reverse=reverse)
    last = slice(0, 1) if reverse else slice(-1, None)
    return decay.prod(0, keepdim=True), decay[last] * bounds[last] + local[last]
