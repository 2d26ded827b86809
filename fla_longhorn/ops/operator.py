"""What the public functions run: the operator of `torch.library`, or in a plain call the kernels themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, Result, get_tensors
from fla_longhorn.ops.autograd import longhorn_fwd, needs_gradient
from fla_longhorn.ops.backends import backend_of
from fla_longhorn.ops.checkpoints import checkpoint_interval, filled_slots
from fla_longhorn.ops.context_parallel import is_split, of_rank, run_on_ranks
from fla_longhorn.ops.inputs import check_inputs
from fla_longhorn.ops.naive import recurrence
from fla_longhorn.ops.plain import is_plain, is_transformed

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def check_and_run(
    args: Arguments, cu_seqlens_cpu: Tensor | None, cp_context: FLACPContext | None = None, *, parallel: bool,
    intermediate: bool = False,
) -> Result:
    """Return `o [B, T, H, V]` and the final state; `parallel` allows splitting sequences into segments or chunks.

    With `intermediate`, the states before every `checkpoint_interval(K)`-th token are returned too.
    """
    if cp_context is not None:
        args, cu_seqlens_cpu = of_rank(args, cp_context, intermediate=intermediate), cp_context.cu_seqlens_cpu
        if is_split(cp_context):
            return run_on_ranks(args, cp_context, parallel=parallel), None
    plain = is_plain(*get_tensors(args))
    check_inputs(args, cu_seqlens_cpu)
    # operators of `torch.library` have a formula for backward alone: forward mode would drop the tangents silently
    if not plain and is_transformed(*args.differentiable):
        o, final_state, states = recurrence(args, cu_seqlens_cpu)
        return (o, final_state, states) if intermediate else (o, final_state)
    if intermediate and needs_gradient(args):
        raise ValueError(
            'return_intermediate_states must be False where an input needs a gradient: intermediate states are not '
            'differentiable, call under torch.no_grad()'
        )
    args = with_float(args)
    if intermediate:
        # no backward follows
        args = args._replace(disable_recompute=False)
    # states are saved if they are asked for or a backward may follow
    if plain:
        o, final_state, states = backend_of(args).longhorn_fwd(args, save_states=intermediate, parallel=parallel)
    else:
        # a trace serves calls with and without gradients
        save_states = intermediate or torch.jit.is_tracing() or needs_gradient(args)
        o, final_state, states, _ = longhorn_fwd(*args, save_states, parallel)
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
