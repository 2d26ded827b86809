"""The operators of `torch.library`, forward and backward, with fakes and autograd.

Each takes the fields of :class:`fla_longhorn.ops.arguments.Arguments`, which its schema follows, and calls the backend's
`longhorn_fwd` or `longhorn_bwd` (:class:`fla_longhorn.ops.backends.Backend`).

Shapes: B rows, T tokens, H heads, K state size, V channels, N sequences (B of them without `cu_seqlens`), S states saved
for backward, one at the start of each `checkpoint_interval(K)` tokens of each sequence. A backend that keeps the exact form's
updates U may save the states behind the sequences in their place.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import DIFFERENTIABLE, TENSORS, TYPES, Arguments, Gradients, get_tensors, or_empty
from fla_longhorn.ops.backends import backend_of
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.inputs import check_boundaries

SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', float: 'float', bool: 'bool', int: 'int'}
FIELDS = {name: f'{SCHEMA_TYPES[kind]} {name}' for name, kind in TYPES.items()}
SCHEMA = ', '.join(FIELDS.values())
GRADIENTS = ', '.join(['Tensor'] * len(DIFFERENTIABLE))


def with_boundaries_checked(args: Arguments) -> Arguments:
    """Check boundaries on the CPU again: while a program is compiled, their values are unknown."""
    if args.cu_seqlens is not None and args.cu_seqlens.device.type == 'cpu':
        check_boundaries(args.cu_seqlens, args.q.shape[1])
    return args


@torch.library.custom_op(
    'fla_longhorn::longhorn_fwd', mutates_args=(),
    schema=f'({SCHEMA}, bool save_states, bool parallel) -> (Tensor, Tensor, Tensor, Tensor)',
)
def longhorn_fwd(*inputs) -> tuple[Tensor, ...]:
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]`, `states [S, H, K, V]` and `us [B, T, H, V]`.

    Each is empty where it is not requested; U also where the backend does not keep it.
    """
    *fields, save_states, parallel = inputs
    args = with_boundaries_checked(Arguments(*fields))
    us = new_updates(args, save_states=save_states, parallel=parallel)
    kept: dict[str, Any] = {} if us is None else {'updates': us}
    outputs = backend_of(args).longhorn_fwd(args, save_states=save_states, parallel=parallel, **kept)
    return *outputs, or_empty(us, args.q)


def new_updates(args: Arguments, *, save_states: bool, parallel: bool) -> Tensor | None:
    """Where the forward stores U for backward, if it is to and the backend's forward can."""
    if not (args.disable_recompute and save_states):
        return None
    keeps_updates = getattr(backend_of(args), 'keeps_updates', None)
    if keeps_updates is None or not keeps_updates(args, parallel=parallel):
        return None
    return args.v.new_empty(args.v.shape, dtype=torch.bfloat16)


@longhorn_fwd.register_fake
def _(*inputs):
    *fields, save_states, parallel = inputs
    args = Arguments(*fields)
    B, T, H, K, V = args.sizes
    o = torch.empty_like(args.v, memory_format=torch.contiguous_format)
    final_state = args.q.new_empty(args.state_shape if args.output_final_state else 0, dtype=torch.float32)
    slots = num_checkpoints(B, T, args.num_sequences, checkpoint_interval(K), args.cu_seqlens is not None)
    # meta tensors are on no device
    us = None if args.q.is_meta else new_updates(args, save_states=save_states, parallel=parallel)
    if us is not None and cast(Any, backend_of(args)).saves_ends(args):
        slots = args.num_sequences
    states = args.q.new_empty((slots, H, K, V) if save_states else 0, dtype=torch.float32)
    return o, final_state, states, or_empty(us, args.q)


@torch.library.custom_op(
    'fla_longhorn::longhorn_bwd', mutates_args=(),
    schema=f'(Tensor do, Tensor? dht, Tensor states, Tensor? us, {SCHEMA}, bool parallel) -> ({GRADIENTS})',
)
def longhorn_bwd(do: Tensor, dht: Tensor | None, states: Tensor, us: Tensor | None, *inputs) -> tuple[Tensor, ...]:
    """Return :class:`Gradients` as an operator's plain tuple, in which that of an absent input is empty."""
    *fields, parallel = inputs
    args = Arguments(*fields)
    kept: dict[str, Any] = {} if us is None else {'updates': us}
    gradients = backend_of(args).longhorn_bwd(do, dht, states, args, parallel=parallel, **kept)
    return tuple(args.q.new_empty(0) if dx is None else dx for dx in gradients)


@longhorn_bwd.register_fake
def _(do, dht, states, us, *inputs):
    args = Arguments(*inputs[:-1])
    return tuple(
        args.q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in args.differentiable
    )


def gradients_of(
    do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool, us: Tensor | None = None,
) -> Gradients:
    """The gradients by :func:`longhorn_bwd`."""
    found = zip(args.differentiable, longhorn_bwd(do, dht, states, us, *args, parallel), strict=True)
    return Gradients(*(cast(Any, None if x is None else dx) for x, dx in found))


def _setup_context(ctx, inputs, output):
    *fields, _, parallel = inputs
    args = Arguments(*fields)
    o, _, states, us = output
    ctx.save_for_backward(*get_tensors(args), states, us)
    ctx.mark_non_differentiable(states, us)
    ctx.set_materialize_grads(False)
    ctx.args, ctx.parallel, ctx.shape = args.without(TENSORS), parallel, o.shape


def _backward(ctx, do, dht, *_):
    *tensors, states, us = ctx.saved_tensors
    args = ctx.args._replace(**dict(zip(TENSORS, tensors, strict=True)))
    if do is None:
        do = args.v.new_zeros(ctx.shape)
    gradients = gradients_of(do, dht, states, args, parallel=ctx.parallel, us=us if us.numel() else None)
    # one per field; save_states and parallel have none
    return *(getattr(gradients, name, None) for name in FIELDS), None, None


longhorn_fwd.register_autograd(_backward, setup_context=_setup_context)


def _second_backward(ctx, *gradients):
    raise RuntimeError(
        'the Longhorn operators have no second derivative (create_graph=True): call naive_recurrent_longhorn, which '
        'is differentiable any number of times, or torch.func.hessian, which runs it'
    )


longhorn_bwd.register_autograd(_second_backward)


def needs_gradient(args: Arguments) -> bool:
    """Whether a backward may follow, which needs saved states."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args.differentiable)
