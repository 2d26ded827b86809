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
        each in its input's dtype; empty if the input is absent. With `args.g` [B, T, H, V] or [B, T, H], that of g too.

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

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, or_empty
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import launching
from fla_longhorn.ops.triton.diagonal.backward import longhorn_diagonal_bwd
from fla_longhorn.ops.triton.diagonal.forward import longhorn_diagonal_fwd
from fla_longhorn.ops.triton.diagonal.step import longhorn_diagonal_step
from fla_longhorn.ops.triton.diagonal.summaries import backward_summary, forward_summary
from fla_longhorn.ops.triton.exact.backward import chunk_longhorn_exact_bwd
from fla_longhorn.ops.triton.exact.forward import chunk_longhorn_exact_fwd
from fla_longhorn.ops.triton.exact.recurrent import fused_recurrent_longhorn_exact_fwd
from fla_longhorn.ops.triton.scalar_beta import longhorn_shortcut

__all__ = ['backward_summary', 'forward_summary', 'longhorn_bwd', 'longhorn_fwd', 'longhorn_shortcut', 'view_states']


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the states and call the launcher of the update and form, which writes them and returns `o`."""
    B, T, H, K, V = args.sizes
    is_varlen = args.cu_seqlens is not None
    # it may be the initial state: a program reads its block before it writes it
    ht, states = final_state if pool is None else pool.states, None
    if ht is None and args.output_final_state:
        ht = args.q.new_empty(args.state_shape, dtype=torch.float32)
    if save_states:
        slots = num_checkpoints(B, T, args.num_sequences, checkpoint_interval(K), is_varlen)
        states = args.q.new_empty((slots, H, K, V), dtype=torch.float32)
    with launching(args):
        if args.exact and parallel:
            o = chunk_longhorn_exact_fwd(args, ht, states, pool)
        elif args.exact:
            o = fused_recurrent_longhorn_exact_fwd(args, ht, states, pool)
        elif T == 1 and not is_varlen and not save_states:
            o = longhorn_diagonal_step(args, ht, pool)
        else:
            o = longhorn_diagonal_fwd(args, ht, states, pool, parallel=parallel)
    return o, or_empty(ht, o), or_empty(states, o)


def longhorn_bwd(do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool) -> tuple[Tensor, ...]:
    """Call the launchers of the update's backward; the exact update has the chunkwise one alone."""
    with launching(args):
        if args.exact:
            gradients = chunk_longhorn_exact_bwd(do, dht, states, args)
        else:
            gradients = longhorn_diagonal_bwd(do, dht, states, args, parallel=parallel)
    return tuple(args.q.new_empty(0) if dx is None else dx for dx in gradients)


def view_states(states: Tensor, args: Arguments) -> Tensor:
    """The exact update saves states as `[S, H, V, K]`."""
    S, H, K, V = states.shape
    return states.view(S, H, V, K).mT if args.exact else states
