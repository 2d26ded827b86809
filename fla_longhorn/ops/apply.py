"""Check a public operator's arguments, then run it: alone, or on this rank's part of the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd import forward_ad

from fla_longhorn.ops import context_parallel, operator
from fla_longhorn.ops.arguments import Arguments, Result, get_tensors
from fla_longhorn.ops.inputs import check_inputs
from fla_longhorn.ops.naive import recurrence
from fla_longhorn.ops.plain import is_plain, under_transform

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def apply(
    args: Arguments, cu_seqlens_cpu: Tensor | None, cp_context: FLACPContext | None, *, parallel: bool, intermediate: bool,
) -> Result:
    """Return `o [B, T, H, V]` and the final state; `parallel` allows splitting sequences into segments or chunks."""
    if cp_context is not None:
        if args.g is not None:
            raise ValueError('g must be None with cp_context: decays are not exchanged between ranks')
        if intermediate:
            raise ValueError('return_intermediate_states must be False with cp_context, got True')
        return context_parallel.run(args, cp_context, parallel=parallel)
    plain = is_plain(*get_tensors(args))
    check_inputs(args, cu_seqlens_cpu)
    # operators of `torch.library` have a formula for backward alone: forward mode would drop the tangents silently
    if not plain and (under_transform() or has_tangent(args)):
        results = recurrence(args, cu_seqlens_cpu)
        return results if intermediate else results[:2]
    if intermediate:
        return operator.run_with_states(args, cu_seqlens_cpu, parallel)
    return operator.run(args, parallel, plain=plain)


def has_tangent(args: Arguments) -> bool:
    """Whether forward-mode differentiation is active for an input."""
    tensors = (x for x in args.differentiable.values() if x is not None)
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
