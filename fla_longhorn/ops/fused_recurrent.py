"""One pass over time: `fused_recurrent_longhorn`; `longhorn_state_update` updates states in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from fla_longhorn.ops.arguments import Arguments, Result, get_tensors
from fla_longhorn.ops.autograd import needs_gradient
from fla_longhorn.ops.chunk import chunk_longhorn
from fla_longhorn.ops.inputs import check_inputs, check_pool
from fla_longhorn.ops.operator import check_and_run, with_float
from fla_longhorn.ops.plain import is_plain, is_transformed
from fla_longhorn.ops.pool import PAD_SLOT_ID, Pool
from fla_longhorn.ops.update import apart_from, longhorn_update, update

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def fused_recurrent_longhorn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, exact: bool = False,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: FLACPContext | None = None, return_intermediate_states: bool = False,
    allow_neg_eigval: bool = False, g: torch.Tensor | None = None, disable_recompute: bool = False,
) -> Result:
    args = Arguments(
        q=q, k=k, v=v, beta=beta, scale=1.0 if scale is None else scale, initial_state=initial_state,
        output_final_state=output_final_state, exact=exact, D=D, z=z, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, allow_neg_eigval=allow_neg_eigval, g=g,
        disable_recompute=disable_recompute,
    )
    return check_and_run(args, cu_seqlens_cpu, cp_context, parallel=False, intermediate=return_intermediate_states)


fused_recurrent_longhorn.__doc__ = (chunk_longhorn.__doc__ or '').replace(
    'over whole sequences.', 'in one pass over time: decoding, short sequences, large batches.'
).replace('chunk_longhorn(', 'fused_recurrent_longhorn(')


def longhorn_state_update(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    exact: bool = False, D: torch.Tensor | None = None, z: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None, state_indices: torch.Tensor | None = None,
    final_state_indices: torch.Tensor | None = None, has_initial_state: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID, allow_neg_eigval: bool = False, g: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Update `state` in place, as decoding does, and return the tokens' outputs.

    Equals :func:`fla_longhorn.ops.fused_recurrent_longhorn` (from 65 tokens on :func:`fla_longhorn.ops.chunk_longhorn`) with
    `initial_state=state`, whose final state replaces `state`. With `state_indices`, `state` is a pool of a serving engine:
    each sequence reads and writes its row of it in place.

    A decoding batch is q of shape `[N, 1, H, K]` without `cu_seqlens`, a single kernel on a GPU. No allocation depends on
    values, so a CUDA graph can capture a call; boundaries are not checked then. There is no gradient.

    Args:
        state (torch.Tensor):
            float32 states of shape `[N, H, K, V]`, or with `state_indices` a pool `[P, H, K, V]` (`[.., H, V, K]` with
            `state_v_first`), overwritten. Each row is contiguous; gaps between rows (`state.stride(0)`) stay untouched.
            Inputs may be views of it: those are copied.
        q, k, v, beta, scale, exact, D, z, use_beta_sigmoid_in_kernel, state_v_first, cu_seqlens, cu_seqlens_cpu, \
        allow_neg_eigval, g:
            As in :func:`fla_longhorn.ops.chunk_longhorn`.
        state_indices (torch.Tensor, Optional):
            The pool's row of each sequence, `[N]`, int32 or int64. A sequence without a row (a negative index, or
            `pad_slot_id`) is skipped: nothing of the pool is read or written, and its output is zero. Default: `None`.
        final_state_indices (torch.Tensor, Optional):
            Rows for the final states, like `state_indices`, whose rows then stay unchanged: for shared prefixes, or tokens
            that may be reverted. A final state without a row is dropped. Default: `None`, which means `state_indices`.
        has_initial_state (torch.Tensor, Optional):
            Whether a sequence starts from its row, bool of shape `[N]`. Others start from zero, whatever the row holds, NaN
            included. Default: `None`, which means all do.
        pad_slot_id (int, Optional):
            Another index that means no row, like the negative ones; vLLM's null block is 0. Default: -1.

    Returns:
        o (torch.Tensor):
            Outputs of shape `[B, T, H, V]` in the dtype of `v`.

    Raises:
        ValueError: a shape, device or boundary does not fit, the rows of `state` are not contiguous, it is a negative view,
            a gradient is required or a `torch.func` transform is active. On the CPU also: an index is outside the pool, or
            a sequence writes a row that another one reads or writes. On a GPU indices are not read, and such results are
            undefined.
        TypeError: a type or dtype does not fit.

    Examples::
        >>> q, k = torch.randn(2, 2, 1, 1, 16)
        >>> v, beta = torch.randn(2, 1, 1, 32), torch.rand(2, 1, 1, 32)
        >>> state = torch.zeros(2, 1, 16, 32)
        >>> longhorn_state_update(state, q, k, v, beta).shape
        torch.Size([2, 1, 1, 32])
        >>> pool = torch.zeros(100, 1, 16, 32)
        >>> longhorn_state_update(pool, q, k, v, beta, state_indices=torch.tensor([41, -1]))[1].count_nonzero()
        tensor(0)
    """
    pool = Pool(state, state_indices, final_state_indices, has_initial_state, pad_slot_id)
    args = Arguments(
        q=q, k=k, v=v, beta=beta, scale=1.0 if scale is None else scale, initial_state=None if pool.is_chosen_from else state,
        output_final_state=True, exact=exact, D=D, z=z, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, allow_neg_eigval=allow_neg_eigval, g=g,
    )
    # the checks of the pool name it `state`
    args = args._replace(initial_state=None)
    check_inputs(args, cu_seqlens_cpu)
    check_pool(pool, args)
    args = with_float(args)
    if is_plain(*get_tensors(args), *pool[:4]):
        if not state.is_inference():
            # a backward that saved the states must fail
            increment_version(state)
        return update(pool, apart_from(state, args))
    with_states = args._replace(initial_state=state)
    if is_transformed(*with_states.differentiable):
        raise ValueError(
            'longhorn_state_update updates states in place, which forward mode and the transforms of torch.func (vmap, grad, '
            'jvp) do not: call it outside of them, or fused_recurrent_longhorn, which returns the states'
        )
    if needs_gradient(with_states):
        raise ValueError(
            'longhorn_state_update has no gradient, and an input requires one: call it under torch.no_grad(), '
            'or fused_recurrent_longhorn, which is differentiable'
        )
    return longhorn_update(*pool, *args)
