"""What tokens of the diagonal update do to an initial state: `decay * state + local`, elementwise.

For one sequence `[1, T, H, *]`; results are float32 `[1, H, K, V]`. Triton has kernels for this. Else the operator runs:
`local` is the final state from zeros, `decay` the one from ones with all values zero.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.autograd import gradients_of, longhorn_fwd
from fla_longhorn.ops.backends import backend_of
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints


def forward_summary(args: Arguments, *, with_decay: bool) -> tuple[Tensor | None, Tensor]:
    """(decay, local) of the tokens, from `k`, `v`, `beta` and `g`; decay may be None without `with_decay`."""
    if (kernels := getattr(backend_of(args), 'summaries', None)) is not None:
        return kernels.forward_summary(args)
    v, h0, repeated = args.v, None, {name: getattr(args, name) for name in ('k', 'beta', 'g')}
    if with_decay:
        zeros = v.new_zeros(1, *args.k.shape[2:], v.shape[-1], dtype=torch.float32)
        h0 = torch.cat([zeros, zeros + 1])
        repeated = {name: None if x is None else x.repeat_interleave(2, 0) for name, x in repeated.items()}
        v = F.pad(v, (0, 0) * 3 + (0, 1))
    args = args._replace(**repeated, q=repeated['k'], v=v, initial_state=h0, D=None, z=None, output_final_state=True)
    _, state, *_ = longhorn_fwd(*args, False, True)
    return (state[1:], state[:1]) if with_decay else (None, state)


def backward_summary(do: Tensor, states: Tensor, args: Arguments, *, parallel: bool) -> Tensor:
    """Gradient of the initial state where the final state has none; `states` are those that forward saved."""
    if (kernels := getattr(backend_of(args), 'summaries', None)) is not None:
        return kernels.backward_summary(do, args)
    _, T, _, K, _ = args.sizes
    states = states[:num_checkpoints(1, T, 1, checkpoint_interval(K), False)]
    args = args._replace(initial_state=states[:1], D=None)
    return cast(Tensor, gradients_of(do, None, states, args, parallel=parallel).initial_state)
