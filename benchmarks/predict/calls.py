"""The passes whose times are predicted: Longhorn's as the layer calls it, and those of fla's operators at equal work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.autograd import new_updates
from fla_longhorn.ops.triton import longhorn_bwd, longhorn_fwd, saves_ends
from fla_longhorn_extras.scalar_beta import chunk_scalar_beta
from offgpu.calibration.calls import operator
from offgpu.predict.capture import Pass


@dataclass(frozen=True)
class Shape:
    """Rows, tokens, channels, entries of a key; one head."""

    B: int
    T: int
    V: int
    K: int

    def __str__(self) -> str:
        return f'B={self.B} T={self.T} V={self.V} K={self.K}'


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device='meta')


def layer_arguments(
    s: Shape, T: int, exact: bool, scalar: bool = False, gate: str | None = None, kept: bool = False,
) -> Arguments:
    """The operator's inputs as the layer passes them, in bfloat16: q and k are slices of one projection, z is half of another.

    `scalar`: beta is one per head; `gate`: a float32 decay per 'head' or 'channel'; `kept`: forward keeps its updates.
    """
    rank = s.V // 32
    _, k, q = empty(s.B, T, rank + 2 * s.K).split([rank, s.K, s.K], -1)
    z, v, D = empty(s.B, T, 2 * s.V)[..., s.V:], empty(s.B, T, 1, s.V), empty(1, s.V)
    beta = empty(s.B, T, 1, *([] if scalar else [s.V]))
    options: dict[str, Any] = dict(
        exact=exact, D=D, z=z.unflatten(-1, (1, s.V)), use_beta_sigmoid_in_kernel=True, disable_recompute=kept,
    )
    if gate:
        options['g'] = empty(s.B, T, 1, *([] if gate == 'head' else [s.V]), dtype=torch.float32)
    return Arguments(q.unflatten(-1, (1, s.K)), k.unflatten(-1, (1, s.K)), v, beta, **options)


def longhorn_forward(s: Shape, exact: bool, **options: Any) -> Pass:
    def prepare(T: int) -> Callable[[], object]:
        args = layer_arguments(s, T, exact, **options)
        us = new_updates(args, save_states=True, parallel=True)
        return partial(longhorn_fwd, args, save_states=True, parallel=True, updates=us)
    return prepare


def longhorn_backward(s: Shape, exact: bool, **options: Any) -> Pass:
    """The backward alone, with states as a forward saves them."""
    from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints

    def prepare(T: int) -> Callable[[], object]:
        args = layer_arguments(s, T, exact, **options)
        us, slots = new_updates(args, save_states=True, parallel=True), s.B
        if us is None or not saves_ends(args):
            slots = num_checkpoints(s.B, T, s.B, checkpoint_interval(s.K), False)
        states = empty(slots, 1, s.K, s.V, dtype=torch.float32)
        return partial(longhorn_bwd, empty(s.B, T, 1, s.V), None, states, args, parallel=True, updates=us)
    return prepare


PASSES: dict[str, Callable[[Shape], Pass]] = {
    'diagonal_fwd': lambda s: longhorn_forward(s, False),
    'diagonal_bwd': lambda s: longhorn_backward(s, False),
    'exact_fwd': lambda s: longhorn_forward(s, True),
    'exact_bwd': lambda s: longhorn_backward(s, True),
}


def peer(module: str, name: str, backward: bool) -> Callable[[Shape], Pass]:
    """The forward or backward of an operator of fla with as many tokens, channels and state entries, and one head."""
    def make(s: Shape) -> Pass:
        def prepare(T: int) -> Callable[[], object]:
            op = operator(module, name)
            q, k, v = (empty(s.B, T, 1, n).requires_grad_(backward) for n in (s.K, s.K, s.V))
            beta = empty(s.B, T, 1).requires_grad_(backward)
            of_head = name == 'chunk_gated_delta_rule'
            g = empty(s.B, T, 1, *([] if of_head else [s.K]), dtype=torch.float32).requires_grad_(backward)
            step = {'chunk_gla': dict(g=g), 'chunk_delta_rule': dict(beta=beta)}.get(name, dict(g=g, beta=beta))
            forward = partial(op, q, k, v, **step, scale=1.0)
            if not backward:
                return forward
            o, _ = forward()
            # not o.backward(), which would add to gradients of the inputs
            return partial(torch.autograd.grad, o, [q, k, v, *step.values()], torch.empty_like(o))
        return prepare
    return make


def gated(make: Callable[..., Pass], exact: bool, gate: str) -> Callable[[Shape], Pass]:
    """A pass with a decay in Longhorn's kernels."""
    return lambda s: make(s, exact, gate=gate)


GATED = {
    f'{update}_{gate}_gate_{direction}': gated(make, update == 'exact', gate)
    for update in ('diagonal', 'exact') for gate in ('head', 'channel')
    for direction, make in (('fwd', longhorn_forward), ('bwd', longhorn_backward))
}

PEERS = {
    f'{name}_{direction}': peer(module, name, direction == 'bwd')
    for module, name in (('gla', 'chunk_gla'), ('delta_rule', 'chunk_delta_rule'), ('kda', 'chunk_kda'))
    for direction in ('fwd', 'bwd')
}
GATED |= {
    f'chunk_gated_delta_rule_{direction}': peer('gated_delta_rule', 'chunk_gated_delta_rule', direction == 'bwd')
    for direction in ('fwd', 'bwd')
}


def scalar_by_gla(backward: bool) -> Callable[[Shape], Pass]:
    """The diagonal update with one step size per head, by fla's `chunk_gla` and PyTorch's kernels around it."""
    def make(s: Shape) -> Pass:
        def prepare(T: int) -> Callable[[], object]:
            args = layer_arguments(s, T, False, scalar=True)
            inputs = {n: x.detach().requires_grad_(backward) for n, x in args._asdict().items() if isinstance(x, torch.Tensor)}
            forward = partial(chunk_scalar_beta, args._replace(**inputs))
            if not backward:
                return forward
            o, _ = forward()
            return partial(torch.autograd.grad, o, [*inputs.values()], torch.empty_like(o))
        return prepare
    return make


# one step size per head: both routes of the diagonal update
SCALAR = {
    'diagonal_scalar_fwd': lambda s: longhorn_forward(s, False, scalar=True),
    'diagonal_scalar_bwd': lambda s: longhorn_backward(s, False, scalar=True),
    'chunk_gla_scalar_fwd': scalar_by_gla(backward=False), 'chunk_gla_scalar_bwd': scalar_by_gla(backward=True),
}
# with `disable_recompute`
RETAINED = {
    f'exact_kept_{gate}{direction}': partial(make, exact=True, gate=option, kept=True)
    for gate, option in (('', None), ('head_gate_', 'head'))
    for direction, make in (('fwd', longhorn_forward), ('bwd', longhorn_backward))
}
SELECTABLE = {**PASSES, **GATED, **RETAINED, **PEERS, **SCALAR}
