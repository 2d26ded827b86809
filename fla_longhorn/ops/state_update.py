"""`longhorn_state_update`: decoding with the state updated in place."""

from __future__ import annotations

import torch

from fla_longhorn.ops.apply import takes_other_derivatives
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.inputs import check_inputs
from fla_longhorn.ops.operator import longhorn_update, needs_gradient


def longhorn_state_update(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    exact: bool = False,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Take `state` over the tokens in place, as decoding does, and return their outputs.

    The same as :func:`fla_longhorn.ops.fused_recurrent_longhorn` with `initial_state=state`, whose final state ends up in
    `state`; nothing the size of a state is allocated, and on a GPU a single token is one kernel without a host
    synchronisation, which a CUDA graph can hold. It has no gradient.

    Args:
        state (torch.Tensor):
            Contiguous float32 states of shape `[N, H, K, V]` (`[N, H, V, K]` with `state_v_first`), overwritten.
        q, k, v, beta, scale, exact, D, z, use_beta_sigmoid_in_kernel, state_v_first, cu_seqlens, cu_seqlens_cpu:
            As in :func:`fla_longhorn.ops.chunk_longhorn`.

    Returns:
        o (torch.Tensor):
            Outputs of shape `[B, T, H, V]` in the dtype of `v`.

    Raises:
        ValueError: a shape, a device or boundaries don't fit, `state` isn't contiguous, or a gradient is asked for.
        TypeError: a type or a dtype doesn't fit.

    Examples::
        >>> q, k = torch.randn(2, 2, 1, 1, 16)
        >>> v, beta = torch.randn(2, 1, 1, 32), torch.rand(2, 1, 1, 32)
        >>> state = torch.zeros(2, 1, 16, 32)
        >>> longhorn_state_update(state, q, k, v, beta).shape
        torch.Size([2, 1, 1, 32])
    """
    args = Arguments(
        q, k, v, beta, 1.0 if scale is None else scale, state, True, exact, D, z, use_beta_sigmoid_in_kernel, state_v_first,
        cu_seqlens,
    )
    check_inputs(args, cu_seqlens_cpu, state_name='state')
    if state.dtype != torch.float32:
        raise TypeError(f'state must be float32 to be updated in place, got {state.dtype}')
    if not state.is_contiguous():
        raise ValueError(f'state must be contiguous to be updated in place, got strides {state.stride()}')
    if needs_gradient(args) or takes_other_derivatives(args):
        raise ValueError(
            'longhorn_state_update has no gradient, and an input requires one: call it under torch.no_grad(), '
            'or fused_recurrent_longhorn, which is differentiable'
        )
    return longhorn_update(*args._replace(scale=float(args.scale)))
