"""A layer's decoded token between its first and its last projection, in one loop."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn as nn

from fla_longhorn.layers.gate import Gate
from fla_longhorn.layers.longhorn import Longhorn
from fla_longhorn.modules import L2Norm, ShortConvolution
from fla_longhorn.modules.bare import is_bare
from fla_longhorn.ops.inputs import check_rows
from fla_longhorn.ops.plain import is_plain
from fla_longhorn.ops.pool import Pool
from fla_longhorn_cpu import mixer as loop
from fla_longhorn_cpu.mixer import Mixer as Mixer

# those that the loop replaces, and others
METHODS = {
    name: method for name, method in vars(Longhorn).items()
    if callable(method) and not name.startswith('__') and name not in ('forward', 'extra_repr')
}


def mix_layer(
    layer: Longhorn, x: torch.Tensor, z: torch.Tensor, conv_state: torch.Tensor, recurrent_state: torch.Tensor,
) -> torch.Tensor | None:
    """As :class:`fla_longhorn.ops.backends.TokenLoops` has it."""
    # the loop checks the tensors themselves
    if conv_state.requires_grad or not is_plain() or not is_as_made(layer):
        return None
    # where `nn.Module` looks attributes up too, but in more time
    parts, own, gate = cast(dict[str, Any], layer._modules), cast(dict[str, Any], layer._parameters), layer.gate
    conv, x_proj, beta_proj = (parts[name]._parameters for name in ('conv1d', 'x_proj', 'beta_proj'))
    try:
        given = conv['weight'], conv['bias'], x_proj['weight'], beta_proj['weight'], beta_proj['bias'], own['D']
    except KeyError:
        # a tensor that is no parameter
        return None
    mixer = Mixer(
        *given,
        num_heads=layer.num_heads,
        state_size=layer.state_size,
        exact=layer.exact,
        allow_neg_eigval=layer.allow_neg_eigval,
        key_eps=getattr(parts['k_norm'], 'eps', None),
        gate=None if gate is None else (gate.down.weight, gate.up.weight, gate.A_log, gate.dt_bias),
    )
    return loop.mix_tokens(x, z, mixer, conv_state, Pool(recurrent_state))


def mix_tokens(
    x: torch.Tensor, z: torch.Tensor, mixer: Mixer, memory: torch.Tensor, pool: Pool,
) -> torch.Tensor | None:
    """The input of a layer's last projection, given the halves of the first one's output, for one token per sequence.

    Between the steps, whose equations :class:`fla_longhorn.layers.Longhorn` gives, numbers have the dtype of `x`. Tensors are
    not differentiated, traced or transformed (:func:`fla_longhorn.ops.plain.is_plain`).

    Args:
        x, z (torch.Tensor): `[N, d]` or `[N, 1, d]`.
        mixer (Mixer): the layer's parameters and options.
        memory (torch.Tensor):
            The convolution's inputs before the tokens, the newest last: `[N, d, 4]`, or where `pool` names rows `[P, 3, d]`.
            Updated in place.
        pool (Pool): float32 states `[N, H, K, V]`, or with rows a pool `[P, H, K, V]`. Updated in place.

    Returns:
        A new tensor like `x`, or None, with nothing changed, if there is no such loop for these tensors, or if there is so
        much work that several threads do it faster step by step.

    Raises:
        ValueError: a row is outside of the pool, or a sequence writes one that another reads or writes.
    """
    if pool.is_chosen_from:
        if memory.shape[0] != pool.states.shape[0]:
            raise ValueError(
                f'memory and states must be pools of as many rows, got {memory.shape[0]} and {pool.states.shape[0]}'
            )
        check_rows(pool, x.shape[0])
    return loop.mix_tokens(x, z, mixer, memory, pool)


def is_as_made(layer: Longhorn) -> bool:
    """Whether the loop computes what the layer's own methods and parts would: no adapter, hook, override or bias was added."""
    if not has_own_methods(cast(Any, type(layer))) or not METHODS.keys().isdisjoint(vars(layer)):
        return False
    parts: Any = layer._modules
    gate, conv, biased, unbiased = layer.gate, parts['conv1d'], parts['beta_proj'], [parts['x_proj']]
    if gate is not None:
        if not runs(gate, Gate):
            return False
        unbiased += gate.down, gate.up
    # generators are slower
    for linear in unbiased:
        if not runs(linear, nn.Linear) or linear.bias is not None:
            return False
    if not (runs(biased, nn.Linear) and runs(conv, ShortConvolution) and runs(parts['k_norm'], L2Norm, nn.Identity)):
        return False
    return layer.v_proj is None and conv.activation in ('silu', 'swish')


@cache
def has_own_methods(cls: Any) -> bool:
    return all(getattr(cls, name) is method for name, method in METHODS.items())


def runs(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether calling `module`, of one of `classes`, runs that class's forward and nothing else."""
    return type(module) in classes and is_bare(module)
