"""`fused_recurrent_longhorn`: decoding and short sequences, in one pass over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops import context_parallel
from fla_longhorn.ops.chunk import chunk_longhorn
from fla_longhorn.ops.inputs import check_inputs
from fla_longhorn.ops.operator import run

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def fused_recurrent_longhorn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    exact: bool = False,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: FLACPContext | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if cp_context is not None:
        return context_parallel.run(
            q, k, v, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, exact=exact, D=D,
            z=z, use_beta_sigmoid=use_beta_sigmoid_in_kernel, state_v_first=state_v_first, cp_context=cp_context,
            parallel=False,
        )
    check_inputs(
        q, k, v, beta, scale=scale, initial_state=initial_state, exact=exact, D=D, z=z, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=state_v_first,
    )
    return run(
        q, k, v, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state, exact=exact, D=D, z=z,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel, state_v_first=state_v_first, cu_seqlens=cu_seqlens, parallel=False,
    )


fused_recurrent_longhorn.__doc__ = chunk_longhorn.__doc__.replace(
    'over whole sequences.', 'in one pass over time: decoding, short sequences, large batches.'
).replace('chunk_longhorn(', 'fused_recurrent_longhorn(')
