"""Context parallelism: packed sequences in contiguous parts, one on each rank of a group (fla's `FLACPContext`).

A rank's first sequence began on the `pre_num_ranks` ranks before, its last one goes on to the `post_num_ranks` ranks after.
The ranks pass on the state at their boundaries, and its gradient the other way.

The diagonal update is elementwise, so a part maps any state to `decay * state + local`. All ranks gather these summaries, two
`[H, K, V]` each, and every rank composes those of earlier tokens: one exchange for any number of ranks. A token of the exact
update multiplies the state by a matrix that differs between channels, so a summary would be `[H, V, K, K]`. There the state
itself, `[H, K, V]`, goes from rank to rank, and each waits for the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fla_longhorn.ops.apply import check_and_run
from fla_longhorn.ops.arguments import TENSORS, Arguments
from fla_longhorn.ops.context_parallel.gather import GatherFunction
from fla_longhorn.ops.context_parallel.part import INPUTS, Call, Part
from fla_longhorn.ops.context_parallel.ring import RingFunction
from fla_longhorn.ops.inputs import check_cp_context, check_inputs
from fla_longhorn.ops.operator import needs_gradient

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


@torch.compiler.disable
def run_on_part(args: Arguments, cp_context: FLACPContext, *, parallel: bool, intermediate: bool) -> tuple[Tensor, None]:
    """Check the arguments and call the operator on this rank's part. All ranks of the group call it, in the same order."""
    if intermediate:
        raise ValueError('return_intermediate_states must be False with cp_context, got True')
    check_cp_context(cp_context, args.initial_state, args.output_final_state)
    args = args._replace(cu_seqlens=cp_context.cu_seqlens)
    check_inputs(args, cp_context.cu_seqlens_cpu, cu_seqlens_name='cp_context.cu_seqlens')
    if cp_context.group is None or dist.get_world_size(cp_context.group) == 1:
        return check_and_run(args, cp_context.cu_seqlens_cpu, parallel=parallel)[0], None
    # all ranks exchange states [H, K, V]
    args = args._replace(scale=float(args.scale), state_v_first=False)
    call = Call(args.without(TENSORS), Part.of(cp_context), needs_gradient(args), parallel)
    function = RingFunction if args.exact else GatherFunction
    return function.apply(call, args.cu_seqlens, *(getattr(args, name) for name in INPUTS)), None
