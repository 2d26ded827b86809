"""The exact update (arXiv 2407.14207, Theorem 3.1) in Triton: the forward and backward that the operators call.

.. math::
    \\epsilon_t = \\beta_t / (1 + \\beta_t |k_t|^2), \\qquad
    S_t = S_{t-1} + k_t \\otimes \\epsilon_t \\odot (v_t - k_t^\\top S_{t-1})

`exact_fwd` and `exact_bwd` keep the contract of :mod:`fla_longhorn.ops.triton`. With `parallel` the forward is the chunkwise
form of `forward.py`, else the recurrence of `recurrent.py`; both save the same states, and `backward.py` serves both.
"""

from __future__ import annotations

import torch

from fla_longhorn.ops.triton.exact.backward import chunk_longhorn_exact_bwd
from fla_longhorn.ops.triton.exact.forward import chunk_longhorn_exact_fwd
from fla_longhorn.ops.triton.exact.recurrent import fused_recurrent_longhorn_exact_fwd


def exact_fwd(q, k, v, beta, *, initial_state, D, z, cu_seqlens, parallel: bool, **options) -> tuple[torch.Tensor, ...]:
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`; what isn't wanted is empty."""
    forward = chunk_longhorn_exact_fwd if parallel else fused_recurrent_longhorn_exact_fwd
    q, k, v, beta, initial_state, D, z, cu_seqlens = _contiguous(q, k, v, beta, initial_state, D, z, cu_seqlens)
    o, ht, states = forward(q, k, v, beta, initial_state=initial_state, D=D, z=z, cu_seqlens=cu_seqlens, **options)
    return o, *(q.new_empty(0, dtype=torch.float32) if x is None else x for x in (ht, states))


def exact_bwd(
    do, dht, q, k, v, beta, *, initial_state, D, z, cu_seqlens, parallel: bool, **options,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k, v, beta, initial_state, D and z in their dtypes; an absent one's is empty.

    The chunkwise backward serves both forms: `parallel` changes nothing here.
    """
    do, dht, q, k, v, beta, initial_state, D, z, cu_seqlens = _contiguous(
        do, dht, q, k, v, beta, initial_state, D, z, cu_seqlens,
    )
    gradients = chunk_longhorn_exact_bwd(
        do, dht, q, k, v, beta, initial_state=initial_state, D=D, z=z, cu_seqlens=cu_seqlens, **options,
    )
    return tuple(q.new_empty(0) if dx is None else dx for dx in gradients)


def _contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]
