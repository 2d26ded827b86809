"""The Triton backend, and the contract of every backend: a module with these functions.

Plain tensors in, fresh tensors out, no autograd. `args` is a checked :class:`fla_longhorn.ops.arguments.Arguments`. With B
rows, T tokens, H heads, K entries of a key, V channels and N sequences (B without `cu_seqlens`):

    q, k [B, T, H, K]; v, z [B, T, H, V]; beta [B, T, H, V] or [B, T, H]; D [H, V], in float16, bfloat16 or float32, each its
    own, in any strides; initial_state, dht [N, H, K, V] float32 ([N, H, V, K] with state_v_first); cu_seqlens [N + 1].

    longhorn_fwd(args, save_states, parallel, final_state=None, pool=None) -> o, final_state, states
        o is contiguous and has the dtype of v. states [S, H, K, V] holds the state at the start of each chunk of
        `checkpoint_interval(K)` tokens of each sequence, in the slots of `ops/checkpoints.py`; each backend arranges the
        K * V entries of a slot as it likes. An output that was not requested has no elements.
    longhorn_bwd(do, dht, states, args, parallel) -> the gradients of q, k, v, beta, initial_state, D, z
        each in its input's dtype; the gradient of an absent input has no elements.

`final_state`, where given, is the contiguous float32 tensor that the final state is written to; it may be the initial state,
which is then updated in place. With `pool`, a :class:`fla_longhorn.ops.pool.Pool`, both states are None: they are rows of the
pool, contiguous and perhaps apart, and the output of a sequence without a row is zero. `args.exact` chooses the update; with
`parallel` time may be cut into segments or chunks. All sums are float32 and in a fixed order. Memory is never read before it
is written. Kernels run on the device of the tensors, also where PyTorch's current one is another.

A backend may also have:

    view_states(states, args) -> states [S, H, K, V]
        where it arranges the entries in another way
    longhorn_shortcut(args) -> (o, final_state) by another differentiable implementation that is faster for these arguments, or
        None where the operator is to run.
    forward_summary, backward_summary: see `ops/context_parallel/summaries.py`.
"""

from __future__ import annotations

from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.device import custom_device_ctx
from fla_longhorn.ops.triton.diagonal import diagonal_bwd, diagonal_fwd
from fla_longhorn.ops.triton.diagonal.summaries import backward_summary, forward_summary
from fla_longhorn.ops.triton.exact import exact_bwd, exact_fwd
from fla_longhorn.ops.triton.scalar_beta import longhorn_shortcut

__all__ = ['backward_summary', 'forward_summary', 'longhorn_bwd', 'longhorn_fwd', 'longhorn_shortcut', 'view_states']


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    update = exact_fwd if args.exact else diagonal_fwd
    with custom_device_ctx(args.q.device):
        return update(args, save_states=save_states, parallel=parallel, final_state=final_state, pool=pool)


def longhorn_bwd(
    do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool,
) -> tuple[Tensor, ...]:
    update = exact_bwd if args.exact else diagonal_bwd
    with custom_device_ctx(args.q.device):
        return update(do, dht, states, args, parallel=parallel)


def view_states(states: Tensor, args: Arguments) -> Tensor:
    """The exact update's are saved as `[S, H, V, K]`."""
    S, H, K, V = states.shape
    return states.view(S, H, V, K).mT if args.exact else states
