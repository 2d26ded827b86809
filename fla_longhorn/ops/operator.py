"""The operator behind the public functions: `torch.library` custom ops, forward and backward, with fakes and autograd.

A backend is a module with `longhorn_fwd` and `longhorn_bwd` (see :mod:`fla_longhorn.ops.triton`, whose
docstring is the contract). :mod:`fla_longhorn.ops.backend` chooses it by the device of `q`.

Shapes: B rows, T tokens, H heads, K state size, V channels, N sequences (B of them without `cu_seqlens`), S states saved
for backward, one at the start of each `checkpoint_interval(K)` tokens of each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla_longhorn.ops.backend import select_backend
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.triton import scalar_beta


@torch.library.custom_op('fla_longhorn::longhorn_fwd', mutates_args=())
def longhorn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    exact: bool,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    output_final_state: bool,
    save_states: bool,
    parallel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`; what isn't wanted is empty."""
    return select_backend(q.device).longhorn_fwd(
        q, k, v, beta, scale=scale, initial_state=initial_state, D=D, z=z, cu_seqlens=cu_seqlens, exact=exact,
        use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first, output_final_state=output_final_state,
        save_states=save_states, parallel=parallel,
    )


@longhorn_fwd.register_fake
def _(q, k, v, beta, scale, initial_state, D, z, cu_seqlens, exact, use_beta_sigmoid, state_v_first, output_final_state,
      save_states, parallel):
    B, T, H, K = q.shape
    V = v.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = q.new_empty(0, dtype=torch.float32)
    if output_final_state:
        final_state = q.new_empty((N, H, V, K) if state_v_first else (N, H, K, V), dtype=torch.float32)
    states = q.new_empty(0, dtype=torch.float32)
    if save_states:
        S = num_checkpoints(B, T, N, checkpoint_interval(K), cu_seqlens is not None)
        states = q.new_empty((S, H, K, V), dtype=torch.float32)
    return o, final_state, states


@torch.library.custom_op('fla_longhorn::longhorn_bwd', mutates_args=())
def longhorn_bwd(
    do: Tensor,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    exact: bool,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    parallel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, initial_state, D and z, each in its input's dtype; an absent one's is empty."""
    return select_backend(q.device).longhorn_bwd(
        do, dht, q, k, v, beta, scale=scale, initial_state=initial_state, D=D, z=z, cu_seqlens=cu_seqlens, states=states,
        exact=exact, use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first, parallel=parallel,
    )


@longhorn_bwd.register_fake
def _(do, dht, q, k, v, beta, scale, initial_state, D, z, cu_seqlens, states, exact, use_beta_sigmoid, state_v_first,
      parallel):
    return tuple(
        q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, beta, initial_state, D, z)
    )


def _setup_context(ctx, inputs, output):
    q, k, v, beta, scale, initial_state, D, z, cu_seqlens, *options, _, _, parallel = inputs
    o, final_state, states = output
    ctx.save_for_backward(q, k, v, beta, initial_state, D, z, cu_seqlens, states)
    ctx.mark_non_differentiable(states)
    ctx.set_materialize_grads(False)
    ctx.scale, ctx.options = scale, (*options, parallel)
    ctx.shape = o.shape


def _backward(ctx, do, dht, _):
    q, k, v, beta, initial_state, D, z, cu_seqlens, states = ctx.saved_tensors
    if do is None:
        do = v.new_zeros(ctx.shape)
    dq, dk, dv, dbeta, dh0, dD, dz = longhorn_bwd(
        do, dht, q, k, v, beta, ctx.scale, initial_state, D, z, cu_seqlens, states, *ctx.options,
    )
    dh0, dD, dz = (None if x is None else dx for x, dx in ((initial_state, dh0), (D, dD), (z, dz)))
    return dq, dk, dv, dbeta, None, dh0, dD, dz, None, None, None, None, None, None, None


longhorn_fwd.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op('fla_longhorn::longhorn_update', mutates_args=('state',))
def longhorn_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    exact: bool,
    use_beta_sigmoid: bool,
    state_v_first: bool,
) -> Tensor:
    """Return `o [B, T, H, V]` and leave the final state in `state`."""
    o, _, _ = select_backend(q.device).longhorn_fwd(
        q, k, v, beta, scale=scale, initial_state=state, D=D, z=z, cu_seqlens=cu_seqlens, exact=exact,
        use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first, output_final_state=True, save_states=False,
        parallel=False, final_state=state,
    )
    return o


@longhorn_update.register_fake
def _(q, k, v, *_):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    exact: bool,
    D: Tensor | None,
    z: Tensor | None,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    parallel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Call the operator on checked arguments, saving states only where a gradient will ask for them."""
    if parallel and scalar_beta.applies(q, k, v, beta, exact):
        return scalar_beta.chunk_scalar_beta(
            q, k, v, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, exact=exact, D=D,
            z=z, use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        )
    differentiable = (q, k, v, beta, initial_state, D, z)
    save_states = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable)
    o, final_state, _ = longhorn_fwd(
        q, k, v, beta, 1.0 if scale is None else float(scale), None if initial_state is None else initial_state.float(),
        D, z, cu_seqlens, exact, use_beta_sigmoid, state_v_first, output_final_state, save_states, parallel,
    )
    return o, final_state if output_final_state else None
