"""`fused_recurrent_longhorn`: decoding and short sequences, in one pass over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops.apply import apply
from fla_longhorn.ops.arguments import Arguments, Result
from fla_longhorn.ops.chunk import chunk_longhorn
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
    g = apply_gate(q, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return apply(
        Arguments(
            q, k, v, beta, 1.0 if scale is None else scale, initial_state, output_final_state, exact, D, z,
            use_beta_sigmoid_in_kernel, state_v_first, cu_seqlens, allow_neg_eigval, g,
        ),
        cu_seqlens_cpu, cp_context, parallel=False, intermediate=return_intermediate_states,
    )


fused_recurrent_longhorn.__doc__ = (chunk_longhorn.__doc__ or '').replace(
    'over whole sequences.', 'in one pass over time: decoding, short sequences, large batches.'
).replace('chunk_longhorn(', 'fused_recurrent_longhorn(')
