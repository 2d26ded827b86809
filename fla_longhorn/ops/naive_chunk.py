r"""The chunkwise form in PyTorch: the equations of the kernels, to be read and changed.

A chunk has C tokens, `t` and `s`, and starts with the state `S`. With a gate, `d_t = exp(g_1 + ... + g_t)` is what is left of
`S` at token t, and `d_ts = exp(g_{s+1} + ... + g_t)` of what token s wrote; without one, both are 1.

The exact form is DeltaNet's chunkwise form with a step size `E_t = eps_t` per channel, a triangular system that is solved from
the first token to the last:

    U_t = E_t * (V_t - d_t * K_t S - sum_{s < t} d_ts * (K_t . K_s) U_s)        what token t writes under its key
    O_t = d_t * Q_t S + sum_{s <= t} d_ts * (Q_t . K_s) U_s
    S  <- d_C * S + sum_s d_Cs * K_s (x) U_s

In the diagonal form each token maps an entry of the state to `a S + b`, elementwise:

    a_t = exp(g_t) * (1 - K_t^2 (x) E_t),    b_t = K_t (x) (E_t * V_t)

Two maps in a row are one, `(a_2 a_1, a_2 b_1 + b_2)`, so log2(C) rounds find the maps from the chunk's start to each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops.arguments import Arguments, Result
from fla_longhorn.ops.naive import check_and_recur

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext

# a power of two up to 32, so that chunks end where intermediate states are returned
CHUNK = 16


def naive_chunk_longhorn(
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
    return_intermediate_states: bool = False,
    allow_neg_eigval: bool = False,
    g: torch.Tensor | None = None,
    disable_recompute: bool = False,
) -> Result:
    """Longhorn's update by chunks of :data:`CHUNK` tokens, in PyTorch, with the equations of this file.

    As :func:`fla_longhorn.ops.naive_recurrent_longhorn`, in fewer steps: the same arguments, results, dtypes and errors.
    """
    args = Arguments(
        q, k, v, beta, 1.0 if scale is None else scale, initial_state, output_final_state, exact, D, z,
        use_beta_sigmoid_in_kernel, state_v_first, cu_seqlens, allow_neg_eigval, g, disable_recompute,
    )
    return check_and_recur(args, cu_seqlens_cpu, cp_context, return_intermediate_states, advance, CHUNK)


def advance(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, eps: torch.Tensor, g: torch.Tensor | None, S: torch.Tensor, exact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs `[B, C, H, V]` of a chunk and the state `[B, H, K, V]` after it; g is `[B, C, H, V]` or `[B, C, H, 1]`."""
    g = torch.zeros_like(eps[..., :1]) if g is None else g
    return (exact_chunk if exact else diagonal_chunk)(q, k, v, eps, g, S)


def exact_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, eps: torch.Tensor, g: torch.Tensor, S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    C = k.shape[1]
    # [B, C, H, V] and [B, C, C, H, V]
    from_start, between = g.cumsum(1).exp(), decays(g)
    L = torch.einsum('bthk,bshk->btsh', k, k)[..., None] * between
    A = torch.einsum('bthk,bshk->btsh', q, k)[..., None] * between
    R = v - from_start * torch.einsum('bthk,bhkv->bthv', k, S)
    rows: list[torch.Tensor] = []
    for t in range(C):
        rows.append(eps[:, t] * (R[:, t] - sum(L[:, t, s] * rows[s] for s in range(t))))
    U = torch.stack(rows, 1)
    o = from_start * torch.einsum('bthk,bhkv->bthv', q, S) + (A * U[:, None]).sum(2)
    return o, from_start[:, -1, :, None] * S + torch.einsum('bshk,bshv->bhkv', k, between[:, -1] * U)


def decays(g: torch.Tensor) -> torch.Tensor:
    """`d_ts`, `[B, C, C, H, V]`, and 0 for s > t. Sums, not differences of sums, which are NaN for decays to zero."""
    C = g.shape[1]
    later = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)[..., None, None]
    sums = torch.where(later, g[:, :, None], 0).cumsum(1)
    return torch.where(later | torch.eye(C, dtype=torch.bool, device=g.device)[..., None, None], sums.exp(), 0)


def diagonal_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, eps: torch.Tensor, g: torch.Tensor, S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    # [B, C, H, K, V]
    a = g.exp()[..., None, :] * (1 - k.square()[..., None] * eps[..., None, :])
    b = k[..., None] * (eps * v)[..., None, :]
    # each token's map joined with that `n` tokens before, which has joined as many
    n = 1
    while n < k.shape[1]:
        b = torch.cat([b[:, :n], a[:, n:] * b[:, :-n] + b[:, n:]], 1)
        a = torch.cat([a[:, :n], a[:, n:] * a[:, :-n]], 1)
        n *= 2
    states = a * S[:, None] + b
    return torch.einsum('bthk,bthkv->bthv', q, states), states[:, -1]
