"""The Triton backend, and the contract of every backend: a module with these functions.

Plain tensors in, fresh tensors out, no autograd. `args` is a checked :class:`fla_longhorn.ops.arguments.Arguments`. With B
rows, T tokens, H heads, K entries of a key, V channels and N sequences (B without `cu_seqlens`):

    q, k [B, T, H, K]; v, z [B, T, H, V]; beta [B, T, H, V] or [B, T, H]; D [H, V], each in float16, bfloat16 or float32 and
    with any strides; initial_state, dht [N, H, K, V] float32 ([N, H, V, K] with state_v_first); cu_seqlens [N + 1].

    longhorn_fwd(args, save_states, parallel, final_state=None, pool=None) -> o, final_state, states
        o is contiguous and has the dtype of v. states [S, H, K, V] holds the state before every
        `checkpoint_interval(K)`-th token of each sequence, in the slots of `ops/checkpoints.py`; the order of the K * V
        entries in a slot is the backend's choice. An output that was not requested is empty.
    longhorn_bwd(do, dht, states, args, parallel) -> the gradients of q, k, v, beta, initial_state, D, z
        each in its input's dtype; empty if the input is absent. With `args.g` [B, T, H, V] or [B, T, H], which this backend
        does not take, that of g too.

The final state is written to `final_state` if given, a contiguous float32 tensor; it may be the initial state, which is then
updated in place. With `pool`, a :class:`fla_longhorn.ops.pool.Pool`, both states are None: they are contiguous rows of the
pool, perhaps with gaps between them, and the output of a sequence without a row is zero. `args.exact` selects the update;
`parallel` allows splitting sequences into segments or chunks. All sums are float32 and in a fixed order. No memory is read
before it is written. Kernels run on the tensors' device, whatever PyTorch's current one is.

A backend may also have:

    view_states(states, args) -> states [S, H, K, V]
        if it stores the entries in another order
    longhorn_shortcut(args) -> (o, final_state), or None
        another differentiable implementation that is faster for these arguments; None if the operator should run
    forward_summary, backward_summary: see `ops/context_parallel/summaries.py`.
"""

from __future__ import annotations

from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import launching
from fla_longhorn.ops.triton.diagonal import diagonal_bwd, diagonal_fwd
from fla_longhorn.ops.triton.diagonal.summaries import backward_summary, forward_summary
from fla_longhorn.ops.triton.exact import exact_bwd, exact_fwd
from fla_longhorn.ops.triton.scalar_beta import longhorn_shortcut

__all__ = ['backward_summary', 'forward_summary', 'longhorn_bwd', 'longhorn_fwd', 'longhorn_shortcut', 'view_states']


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    update = exact_fwd if args.exact else diagonal_fwd
    with launching(args):
        return update(args, save_states=save_states, parallel=parallel, final_state=final_state, pool=pool)


def longhorn_bwd(do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool) -> tuple[Tensor, ...]:
    update = exact_bwd if args.exact else diagonal_bwd
    with launching(args):
        return update(do, dht, states, args, parallel=parallel)


def view_states(states: Tensor, args: Arguments) -> Tensor:
    """The exact update saves states as `[S, H, V, K]`."""
    S, H, K, V = states.shape
    return states.view(S, H, V, K).mT if args.exact else states
