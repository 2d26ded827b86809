"""From a public operator's arguments to its result: checks, then the operator, on one rank or on each rank's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fla_longhorn.ops import context_parallel, operator
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.inputs import check_inputs

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def apply(
    args: Arguments, cu_seqlens_cpu: Tensor | None, cp_context: FLACPContext | None, *, parallel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return `o [B, T, H, V]` and the final state; with `parallel` the operator may cut time into segments or chunks."""
    if cp_context is not None:
        return context_parallel.run(args, cp_context, parallel=parallel)
    check_inputs(args, cu_seqlens_cpu)
    return operator.run(args, parallel)
