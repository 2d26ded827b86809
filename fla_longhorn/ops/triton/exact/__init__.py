"""The exact update (arXiv 2407.14207, Theorem 3.1) in Triton: the forward and backward that the operators call.

.. math::
    \\epsilon_t = \\beta_t / (1 + \\beta_t |k_t|^2), \\qquad
    S_t = S_{t-1} + k_t \\otimes \\epsilon_t \\odot (v_t - k_t^\\top S_{t-1})

`exact_fwd` and `exact_bwd` follow the contract of :mod:`fla_longhorn.ops.triton`. With `parallel` the forward is the chunkwise
form of `forward.py`, else the recurrence of `recurrent.py`; both save the same states, from which `backward.py` starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, or_empty
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.exact.backward import chunk_longhorn_exact_bwd
from fla_longhorn.ops.triton.exact.forward import chunk_longhorn_exact_fwd
from fla_longhorn.ops.triton.exact.recurrent import fused_recurrent_longhorn_exact_fwd


def exact_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`, empty if not requested.

    `final_state` may be the initial state: a program reads its block before it writes it.
    """
    B, T, H, K, V = args.sizes
    ht, states = final_state if pool is None else pool.states, None
    if ht is None and args.output_final_state:
        ht = args.q.new_empty(args.state_shape, dtype=torch.float32)
    if save_states:
        slots = num_checkpoints(B, T, args.num_sequences, checkpoint_interval(K), args.cu_seqlens is not None)
        states = args.q.new_empty((slots, H, K, V), dtype=torch.float32)
    forward = chunk_longhorn_exact_fwd if parallel else fused_recurrent_longhorn_exact_fwd
    o = forward(args, ht, states, pool)
    return o, or_empty(ht, o), or_empty(states, o)


def exact_bwd(do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, beta, initial_state, D and z in their dtypes, empty if the input is absent.

    Both forms have the chunkwise backward: `parallel` has no effect.
    """
    gradients = chunk_longhorn_exact_bwd(do, None if dht is None else dht.contiguous(), states, args)
    return tuple(args.q.new_empty(0) if dx is None else dx for dx in gradients)
