"""The operators in Triton.

q, k, v, z, beta, g and D have any strides. Kernels run on the tensors' device, whatever PyTorch's current one is, and read no
memory before it is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, Gradients, or_empty
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import launch_key, launching
from fla_longhorn.ops.triton.diagonal import summaries
from fla_longhorn.ops.triton.diagonal.backward import longhorn_diagonal_bwd
from fla_longhorn.ops.triton.diagonal.forward import longhorn_diagonal_fwd, longhorn_diagonal_step
from fla_longhorn.ops.triton.exact.backward import chunk_longhorn_exact_bwd
from fla_longhorn.ops.triton.exact.configs import has_lanes, walks_back
from fla_longhorn.ops.triton.exact.forward import chunk_longhorn_exact_fwd
from fla_longhorn.ops.triton.exact.recurrent import fused_recurrent_longhorn_exact_fwd

__all__ = ['keeps_updates', 'longhorn_bwd', 'longhorn_fwd', 'saves_ends', 'summaries', 'view_states']


def keeps_updates(args: Arguments, *, parallel: bool) -> bool:
    """Whether the forward can round U as it stores it: doubled steps would not forget what that loses."""
    if not (args.exact and parallel and args.beta.dim() == 4) or args.allow_neg_eigval:
        return False
    with launching(args):
        return has_lanes(launch_key(args), args.g)


def saves_ends(args: Arguments) -> bool:
    """Whether backward starts from the states behind the sequences, `states [N, H, K, V]`, where U is kept."""
    with launching(args):
        return walks_back(args, launch_key(args))


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
    updates: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the states and call the launcher of the update and form, which writes them and returns `o`.

    U is stored in `updates [B, T, H, V]`, which is given only where `keeps_updates` holds.
    """
    B, T, H, K, V = args.sizes
    is_varlen = args.cu_seqlens is not None
    # it may be the initial state: a program reads its block before it writes it
    ht, states = final_state if pool is None else pool.states, None
    if ht is None and args.output_final_state:
        ht = args.q.new_empty(args.state_shape, dtype=torch.float32)
    if save_states:
        slots = args.num_sequences
        if updates is None or not saves_ends(args):
            slots = num_checkpoints(B, T, slots, checkpoint_interval(K), is_varlen)
        states = args.q.new_empty((slots, H, K, V), dtype=torch.float32)
    with launching(args):
        if args.exact and parallel:
            o = chunk_longhorn_exact_fwd(args, ht, states, pool, updates)
        elif args.exact:
            o = fused_recurrent_longhorn_exact_fwd(args, ht, states, pool)
        elif T == 1 and not is_varlen and not save_states:
            o = longhorn_diagonal_step(args, ht, pool)
        else:
            o = longhorn_diagonal_fwd(args, ht, states, pool, parallel=parallel)
    return o, or_empty(ht, o), or_empty(states, o)


def longhorn_bwd(
    do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool, updates: Tensor | None = None,
) -> Gradients:
    """Call the launchers of the update's backward; the exact update has the chunkwise one alone."""
    with launching(args):
        return (
            chunk_longhorn_exact_bwd(do, dht, states, args, updates) if args.exact
            else longhorn_diagonal_bwd(do, dht, states, args, parallel=parallel)
        )


def view_states(states: Tensor, args: Arguments) -> Tensor:
    """The exact update saves states as `[S, H, V, K]`."""
    S, H, K, V = states.shape
    return states.view(S, H, V, K).mT if args.exact else states
