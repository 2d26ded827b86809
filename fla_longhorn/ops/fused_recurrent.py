"""`fused_recurrent_longhorn`: decoding and short sequences, in one pass over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops.apply import check_and_run
from fla_longhorn.ops.arguments import Arguments, Result
from fla_longhorn.ops.chunk import chunk_longhorn
from fla_longhorn.ops.context_parallel import run_on_part
from fla_longhorn.ops.gate import apply_gate

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def fused_recurrent_longhorn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, exact: bool = False,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: FLACPContext | None = None, return_intermediate_states: bool = False,
    allow_neg_eigval: bool = False, g: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> Result:
    args = Arguments(
        q=q, k=k, v=v, beta=beta, scale=1.0 if scale is None else scale, initial_state=initial_state,
        output_final_state=output_final_state, exact=exact, D=D, z=z, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, allow_neg_eigval=allow_neg_eigval,
        g=apply_gate(q, g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
    )
    if cp_context is not None:
        return run_on_part(args, cp_context, parallel=False, intermediate=return_intermediate_states)
    return check_and_run(args, cu_seqlens_cpu, parallel=False, intermediate=return_intermediate_states)


fused_recurrent_longhorn.__doc__ = (chunk_longhorn.__doc__ or '').replace(
    'over whole sequences.', 'in one pass over time: decoding, short sequences, large batches.'
).replace('chunk_longhorn(', 'fused_recurrent_longhorn(')
