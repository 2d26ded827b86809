"""The operator that updates a pool of states in place, and inputs that share memory with the pool."""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import TENSORS, Arguments, get_tensors
from fla_longhorn.ops.autograd import FIELDS, SCHEMA_TYPES, with_boundaries_checked
from fla_longhorn.ops.backends import backend_of
from fla_longhorn.ops.inputs import check_rows
from fla_longhorn.ops.pool import Pool

POOL_FIELDS = {name: f'{SCHEMA_TYPES[kind]} {name}' for name, kind in get_type_hints(Pool).items()}
# `(a!)` says that the operator writes to it
POOL_FIELDS['states'] = 'Tensor(a!) states'
UPDATE_SCHEMA = ', '.join((POOL_FIELDS | FIELDS).values())
# up to this length, one pass over the sequence is at least as fast as splitting it
MAX_RECURRENT_LENGTH = 64


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
