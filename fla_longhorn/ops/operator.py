"""The operators behind the public functions: `torch.library` custom ops, forward and backward, with fakes and autograd.

A plain call runs the kernels themselves.

Each takes the fields of :class:`fla_longhorn.ops.arguments.Arguments`, which its schema follows, and calls the backend's
`longhorn_fwd` or `longhorn_bwd` (:class:`Backend`).

Shapes: B rows, T tokens, H heads, K state size, V channels, N sequences (B of them without `cu_seqlens`), S states saved
for backward, one at the start of each `checkpoint_interval(K)` tokens of each sequence.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fla_longhorn.ops.arguments import (
    DIFFERENTIABLE,
    TENSORS,
    TYPES,
    Arguments,
    Result,
    get_tensors,
    is_plain,
    is_transformed,
    under_transform,
)
from fla_longhorn.ops.checkpoints import checkpoint_interval, filled_slots, num_checkpoints
from fla_longhorn.ops.inputs import check_boundaries, check_inputs, check_rows
from fla_longhorn.ops.naive import recurrence
from fla_longhorn.ops.pool import Pool

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext
    from torch.nn import Module

SCHEMA_TYPES = {Tensor: 'Tensor', Tensor | None: 'Tensor?', float: 'float', bool: 'bool', int: 'int'}
FIELDS = {name: f'{SCHEMA_TYPES[kind]} {name}' for name, kind in TYPES.items()}
SCHEMA = ', '.join(FIELDS.values())
GRADIENTS = ', '.join(['Tensor'] * len(DIFFERENTIABLE))
POOL_FIELDS = {name: f'{SCHEMA_TYPES[kind]} {name}' for name, kind in get_type_hints(Pool).items()}
# `(a!)` says that the operator writes to it
POOL_FIELDS['states'] = 'Tensor(a!) states'
UPDATE_SCHEMA = ', '.join((POOL_FIELDS | FIELDS).values())


class Backend(Protocol):
    """A module with these functions, on checked arguments and without autograd."""

    __name__: str

    def longhorn_fwd(
        self, args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None,
        pool: Pool | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`o [B, T, H, V]`, the final state and `states [S, H, K, V]`, empty where they are not requested.

        `parallel` allows splitting sequences. The final state is written to `final_state`, which may be the initial one, or to
        the rows of `pool`. States are saved by the rules of `checkpoints.py`.
        """

    def longhorn_bwd(
        self, do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of `DIFFERENTIABLE`, each like its input, `None` where the input is absent."""

    def view_states(self, states: Tensor, args: Arguments) -> Tensor:
        """Saved states as `[S, H, K, V]`."""


# name -> imports the module; others are added
OP_BACKENDS: dict[str, Callable[[], object]] = {'triton': partial(importlib.import_module, f'{__package__}.triton')}
# name -> whether it is installed and can run, for those that are registered
CPU_BACKENDS: dict[str, Callable[[], bool]] = {}


def register_cpu_backend(name: str, load: Callable[[], object], is_available: Callable[[], bool]) -> None:
    """Add a backend for the CPU alone, which becomes the default there where `is_available()`; `load()` imports it."""
    OP_BACKENDS[name], CPU_BACKENDS[name] = load, is_available
    backend_name.cache_clear()
    load_backend.cache_clear()


def select_backend(device: torch.device) -> Backend:
    """The implementation for tensors on `device`.

    `FLA_LONGHORN_BACKEND` (a name in `OP_BACKENDS`) selects one; if it cannot run there, this raises and never falls back.
    """
    return load_backend(backend_name(device.type, os.environ.get('FLA_LONGHORN_BACKEND')))


@cache
def backend_name(device_type: str, asked: str | None) -> str:
    # Triton reads it once too, when it meets the kernels
    interpreting = os.environ.get('TRITON_INTERPRET') == '1'
    name = asked or default_backend(device_type, interpreting)
    if name not in OP_BACKENDS:
        raise ValueError(f'FLA_LONGHORN_BACKEND must be one of {sorted(OP_BACKENDS)}, got {name!r}')
    if name == 'triton' and device_type == 'cpu' and not interpreting:
        raise ValueError('FLA_LONGHORN_BACKEND=triton runs on a GPU, or on the CPU with TRITON_INTERPRET=1; q is on the CPU')
    if name in CPU_BACKENDS and device_type != 'cpu':
        raise ValueError(f'FLA_LONGHORN_BACKEND={name} runs on the CPU; q is on {device_type}')
    return name


def default_backend(device_type: str, interpreting: bool) -> str:
    """Triton on an accelerator or in its interpreter; on the CPU a registered backend that is available, else PyTorch's."""
    if device_type != 'cpu' or interpreting:
        return 'triton'
    last = 'torch' if 'torch' in OP_BACKENDS else 'triton'
    return next((name for name, is_available in CPU_BACKENDS.items() if is_available()), last)


@cache
def load_backend(name: str) -> Backend:
    return cast(Backend, OP_BACKENDS[name]())


class Ranks(Protocol):
    """What a package brings with which several ranks have parts of one sequence."""

    def check_cp_context(self, cp_context: FLACPContext) -> None: ...

    def run_on_part(
        self, args: Arguments, cp_context: FLACPContext, *, parallel: bool, intermediate: bool,
    ) -> tuple[Tensor, None]: ...

    def convolve_part(self, convolution: Module, x: Tensor, cp_context: FLACPContext) -> Tensor: ...


# set by such a package
ranks: Ranks | None = None
# set by a package for the CPU: its loops of a decoded token, or None where they are switched off
find_token_loops: Callable[[], Any] | None = None
# up to this length, one pass over the sequence is at least as fast as splitting it
MAX_RECURRENT_LENGTH = 64


def backend_of(args: Arguments) -> Backend:
    return select_backend(args.q.device)


def with_boundaries_checked(args: Arguments) -> Arguments:
    """Check boundaries on the CPU again: while a program is compiled, their values are unknown."""
    if args.cu_seqlens is not None and args.cu_seqlens.device.type == 'cpu':
        check_boundaries(args.cu_seqlens, args.q.shape[1])
    return args


@torch.library.custom_op(
    'fla_longhorn::longhorn_fwd', mutates_args=(),
    schema=f'({SCHEMA}, bool save_states, bool parallel) -> (Tensor, Tensor, Tensor)',
)
def longhorn_fwd(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`, empty where they are not requested."""
    *fields, save_states, parallel = inputs
    args = with_boundaries_checked(Arguments(*fields))
    return backend_of(args).longhorn_fwd(args, save_states=save_states, parallel=parallel)


@longhorn_fwd.register_fake
def _(*inputs):
    *fields, save_states, _ = inputs
    args = Arguments(*fields)
    B, T, H, K, V = args.sizes
    o = torch.empty_like(args.v, memory_format=torch.contiguous_format)
    final_state = args.q.new_empty(args.state_shape if args.output_final_state else 0, dtype=torch.float32)
    slots = num_checkpoints(B, T, args.num_sequences, checkpoint_interval(K), args.cu_seqlens is not None)
    return o, final_state, args.q.new_empty((slots, H, K, V) if save_states else 0, dtype=torch.float32)


@torch.library.custom_op(
    'fla_longhorn::longhorn_bwd', mutates_args=(),
    schema=f'(Tensor do, Tensor? dht, Tensor states, {SCHEMA}, bool parallel) -> ({GRADIENTS})',
)
def longhorn_bwd(do: Tensor, dht: Tensor | None, states: Tensor, *inputs) -> tuple[Tensor, ...]:
    """Return the gradients of the tensors of `DIFFERENTIABLE`, each in its input's dtype; an absent input's is empty."""
    *fields, parallel = inputs
    args = Arguments(*fields)
    gradients = backend_of(args).longhorn_bwd(do, dht, states, args, parallel=parallel)
    return tuple(args.q.new_empty(0) if dx is None else dx for dx in gradients)


@longhorn_bwd.register_fake
def _(do, dht, states, *inputs):
    args = Arguments(*inputs[:-1])
    return tuple(
        args.q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in args.differentiable.values()
    )


def _setup_context(ctx, inputs, output):
    *fields, _, parallel = inputs
    args = Arguments(*fields)
    o, _, states = output
    ctx.save_for_backward(*args.tensors.values(), states)
    ctx.mark_non_differentiable(states)
    ctx.set_materialize_grads(False)
    ctx.args, ctx.parallel, ctx.shape = args.without(TENSORS), parallel, o.shape


def _backward(ctx, do, dht, _):
    *tensors, states = ctx.saved_tensors
    args = ctx.args._replace(**dict(zip(TENSORS, tensors, strict=True)))
    if do is None:
        do = args.v.new_zeros(ctx.shape)
    gradients = dict(zip(DIFFERENTIABLE, longhorn_bwd(do, dht, states, *args, ctx.parallel), strict=True))
    # one per field; save_states and parallel have none
    of_fields = (gradients[name] if name in gradients and args.tensors[name] is not None else None for name in FIELDS)
    return *of_fields, None, None


longhorn_fwd.register_autograd(_backward, setup_context=_setup_context)


def _second_backward(ctx, *gradients):
    raise RuntimeError(
        'the Longhorn operators have no second derivative (create_graph=True): call naive_recurrent_longhorn, which '
        'is differentiable any number of times, or torch.func.hessian, which runs it'
    )


longhorn_bwd.register_autograd(_second_backward)


@torch.library.custom_op('fla_longhorn::longhorn_update', mutates_args=('states',), schema=f'({UPDATE_SCHEMA}) -> Tensor')
def longhorn_update(*inputs) -> Tensor:
    """Return `o [B, T, H, V]` of sequences whose states are rows of a pool, and leave the final states there.

    `initial_state` is None: the inputs are the fields of `Pool`, then those of `Arguments`.
    """
    pool, args = split_update(inputs)
    with_boundaries_checked(args)
    return update(pool, apart_from(pool.states, args))


def update(pool: Pool, args: Arguments) -> Tensor:
    """The operator, on checked boundaries and inputs that share no memory with the states."""
    backend, chosen, parallel = backend_of(args), pool.is_chosen_from, is_long(args)
    if chosen and args.q.device.type == 'cpu':
        check_rows(pool, args.num_sequences)
    if not chosen and pool.states.is_contiguous():
        if args.initial_state is None:
            args = args._replace(initial_state=pool.states)
        return backend.longhorn_fwd(args, save_states=False, parallel=parallel, final_state=pool.states)[0]
    return backend.longhorn_fwd(args, save_states=False, parallel=parallel, pool=pool)[0]


def apart_from(states: Tensor, args: Arguments) -> Arguments:
    """Copy the arguments that share memory with `states`, which a kernel may write before it has read all inputs."""
    start, end = span(states)
    # a meta tensor has no memory
    if start == 0:
        return args
    shared: dict[str, Any] = {}
    for name, x in zip(TENSORS, get_tensors(args), strict=True):
        if x is not None and x.data_ptr() < end and span(x)[1] > start:
            shared[name] = x.clone()
    return args._replace(**shared) if shared else args


def span(x: Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the address after the last."""
    start = x.data_ptr()
    if x.is_contiguous():
        return start, start + x.nbytes
    return start, start + x.itemsize * (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)))


@longhorn_update.register_fake
def _(*inputs):
    return torch.empty_like(split_update(inputs)[1].v, memory_format=torch.contiguous_format)


def split_update(inputs: tuple) -> tuple[Pool, Arguments]:
    return Pool(*inputs[:len(POOL_FIELDS)]), Arguments(*inputs[len(POOL_FIELDS):])


def is_long(args: Arguments) -> bool:
    """Whether to split along the sequence; lengths on a device are unknown, so only shapes count."""
    T = args.q.shape[1]
    return T > MAX_RECURRENT_LENGTH and (args.cu_seqlens is None or args.num_sequences < T)


def needs_gradient(args: Arguments) -> bool:
    """Whether a backward may follow, which needs saved states."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args.differentiable.values())


def on_ranks() -> Ranks:
    if ranks is None:
        raise ValueError('cp_context must be None unless a package for several ranks is imported (docs/scale.md)')
    return ranks


def check_and_run(
    args: Arguments, cu_seqlens_cpu: Tensor | None, cp_context: FLACPContext | None = None, *, parallel: bool,
    intermediate: bool = False,
) -> Result:
    """Return `o [B, T, H, V]` and the final state; `parallel` allows splitting sequences into segments or chunks.

    With `intermediate`, the states before every `checkpoint_interval(K)`-th token are returned too.
    """
    if cp_context is not None:
        return on_ranks().run_on_part(args, cp_context, parallel=parallel, intermediate=intermediate)
    plain = is_plain(*get_tensors(args))
    check_inputs(args, cu_seqlens_cpu)
    # operators of `torch.library` have a formula for backward alone: forward mode would drop the tangents silently
    if not plain and (under_transform() or has_tangent(args)):
        o, final_state, states = recurrence(args, cu_seqlens_cpu)
        return (o, final_state, states) if intermediate else (o, final_state)
    if intermediate and needs_gradient(args):
        raise ValueError(
            'return_intermediate_states must be False where an input needs a gradient: intermediate states are not '
            'differentiable, call under torch.no_grad()'
        )
    args = with_float(args)
    # states are saved if they are asked for or a backward may follow
    if plain:
        o, final_state, states = backend_of(args).longhorn_fwd(args, save_states=intermediate, parallel=parallel)
    else:
        # a trace serves calls with and without gradients
        save_states = intermediate or torch.jit.is_tracing() or needs_gradient(args)
        o, final_state, states = longhorn_fwd(*args, save_states, parallel)
    final_state = final_state if args.output_final_state else None
    return (o, final_state, intermediate_states(states, args, cu_seqlens_cpu)) if intermediate else (o, final_state)


def intermediate_states(states: Tensor, args: Arguments, cu_seqlens_cpu: Tensor | None) -> Tensor:
    """Saved states `[S, H, K, V]` as `[B, S / B, H, K, V]`, or `[1, S', H, K, V]` without the slots that stay empty."""
    states = backend_of(args).view_states(states, args)
    if args.cu_seqlens is None:
        states = states.unflatten(0, (args.q.shape[0], -1))
    else:
        bounds = (args.cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
        slots = torch.tensor(filled_slots(bounds, checkpoint_interval(args.q.shape[-1])), dtype=torch.int64, device='cpu')
        states = states[slots.to(states.device)][None]
    return states.mT if args.state_v_first else states


def with_float(args: Arguments) -> Arguments:
    """Convert the scale to a float and the initial state to float32."""
    if type(args.scale) is not float:
        args = args._replace(scale=float(args.scale))
    if args.initial_state is not None and args.initial_state.dtype != torch.float32:
        args = args._replace(initial_state=args.initial_state.float())
    return args


def has_tangent(args: Arguments) -> bool:
    """Whether forward-mode differentiation is active for an input."""
    tensors = (x for x in args.differentiable.values() if x is not None)
    return is_transformed() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
