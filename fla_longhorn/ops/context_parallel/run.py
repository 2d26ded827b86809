"""An operator's call on this rank's part of the sequences."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fla.ops.cp import FLACPContext
from torch import Tensor

from fla_longhorn.ops.arguments import TENSORS, Arguments
from fla_longhorn.ops.autograd import needs_gradient
from fla_longhorn.ops.context_parallel.gather import GatherFunction
from fla_longhorn.ops.context_parallel.part import INPUTS, Call, Part
from fla_longhorn.ops.context_parallel.ring import RingFunction
from fla_longhorn.ops.inputs import check_inputs


@torch.compiler.disable
def of_rank(args: Arguments, cp_context: FLACPContext, *, intermediate: bool) -> Arguments:
    """Check the arguments, and return them with this rank's boundaries."""
    if intermediate:
        raise ValueError('return_intermediate_states must be False with cp_context, got True')
    check_cp_context(cp_context)
    if args.initial_state is not None:
        raise ValueError('initial_state must be None with cp_context: sequences start from zero on the first of their ranks')
    if args.output_final_state:
        raise ValueError('output_final_state must be False with cp_context: a sequence may end on another rank')
    args = args._replace(cu_seqlens=cp_context.cu_seqlens)
    check_inputs(args, cp_context.cu_seqlens_cpu, cu_seqlens_name='cp_context.cu_seqlens')
    return args


def is_split(cp_context: FLACPContext) -> bool:
    """Whether other ranks have tokens too; else the context is its boundaries."""
    return cp_context.group is not None and dist.get_world_size(cp_context.group) > 1


@torch.compiler.disable
def run_on_ranks(args: Arguments, cp_context: FLACPContext, *, parallel: bool) -> Tensor:
    """The outputs `[1, T, H, V]` of this rank's tokens. All ranks of the group call it, in the same order."""
    # all ranks exchange states [H, K, V]
    args = args._replace(scale=float(args.scale), state_v_first=False, disable_recompute=False)
    call = Call(args.without(TENSORS), Part.of(cp_context), needs_gradient(args), parallel)
    function = RingFunction if args.exact else GatherFunction
    return function.apply(call, args.cu_seqlens, *(getattr(args, name) for name in INPUTS))


def check_cp_context(cp_context: FLACPContext) -> None:
    """Raise unless each rank has one contiguous part of the tokens."""
    if not isinstance(cp_context, FLACPContext):
        raise TypeError(f'cp_context must be a fla.ops.cp.FLACPContext or None, got {type(cp_context).__name__}')
    if cp_context.layout != 'contiguous':
        raise ValueError(f"cp_context must have the layout 'contiguous', got {cp_context.layout!r}")
    if cp_context.cu_seqlens is None:
        raise ValueError('cp_context must hold the cu_seqlens of this rank, as build_cp_context makes it, got None')
    group, before, after = cp_context.group, cp_context.pre_num_ranks, cp_context.post_num_ranks
    if group is None:
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError('cp_context.group must hold this process, which is not in it')
    for name, count, most in (('pre_num_ranks', before, rank), ('post_num_ranks', after, size - 1 - rank)):
        if count is None or not 0 <= count <= most:
            raise ValueError(f'cp_context.{name} must be between 0 and {most} on rank {rank} of {size}, got {count}')
