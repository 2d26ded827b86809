"""The operators of fla's GLA, DeltaNet, Gated DeltaNet, KDA and Mamba-2 in PyTorch: their layers train without a GPU.

All of them are one recurrence. With a decay `exp(g)` of each entry of the key,

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,        u_t = beta_t (v_t - k_t^T exp(g_t) S_{t-1}),        o_t = scale q_t^T S_t

where GLA and Mamba-2 have `u_t = v_t`. A chunk of C tokens with decays `G_t = g_1 + ... + g_t` from its start is two products
and one triangular system (arXiv 2406.06484, 2510.26692): with `A_ts = k_t^T exp(G_t - G_s) k_s` for s < t, and the state S
before the chunk,

    (I + diag(beta) A) U = diag(beta) (V - (K exp(G)) S).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, H, V]` from a state of zeros, and the last state `[B, H, K, V]`.

    Args:
        q, k, g (Tensor): `[B, T, H, K]`; `g`, the logarithm of the decay, is at most 0. One a head is `[B, T, H, 1]`.
        v (Tensor): `[B, T, H, V]`.
        beta (Tensor, Optional): Step sizes `[B, T, H]`; `None` to add the values as they are.
        scale (float, Optional): Of the queries. Default: `K ** -0.5`.
    """
    T, K = q.shape[1], q.shape[-1]
    # with a decay of each entry, the scores of a chunk are no matrix product
    C = 8 if g.shape[-1] > 1 else 32
    # tokens of zeros at the end change no output before them, nor the state
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, -T % C)).transpose(1, 2).unflatten(2, (-1, C)) for x in (q, k, v, g))
    G = g.cumsum(-2)
    decay = (G[..., :, None, :] - G[..., None, :, :]).clamp_max(0).exp()
    scores = products(q, decay, k).tril() * (K**-0.5 if scale is None else scale)
    if beta is not None:
        beta = F.pad(beta, (0, 0, 0, -T % C)).transpose(1, 2).unflatten(2, (-1, C))[..., None]
        system = products(k, decay, k).tril(-1) * beta + torch.eye(C, dtype=q.dtype, device=q.device)
        # what a state of zeros leaves, and how the state before the chunk changes it
        values = torch.linalg.solve_triangular(system, torch.cat([v, k * G.exp()], -1) * beta, upper=False)
        v, keys = values.split([v.shape[-1], K], -1)
    queries, ends = q * G.exp() * (K**-0.5 if scale is None else scale), G[..., -1:, :]
    kept, k = ends.exp().mT, k * (ends - G).exp()
    state, outputs = q.new_zeros(*q.shape[:2], K, v.shape[-1]), []
    for i in range(q.shape[2]):
        u = v[:, :, i] if beta is None else v[:, :, i] - keys[:, :, i] @ state
        outputs.append(queries[:, :, i] @ state + scores[:, :, i] @ u)
        state = kept[:, :, i] * state + k[:, :, i].mT @ u
    return torch.cat(outputs, 2)[:, :, :T].transpose(1, 2), state


def products(a: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    """`a_t^T decay_ts b_s` of each chunk."""
    if decay.shape[-1] == 1:
        return a @ b.mT * decay[..., 0]
    return torch.einsum('bhntk,bhntsk,bhnsk->bhnts', a, decay, b)


def whole(name: str, given: dict[str, Any]) -> None:
    """Refuse what training on whole sequences does not ask for."""
    unknown = [x for x, value in given.items() if value not in (None, False) and x != 'state_v_first']
    if unknown:
        raise NotImplementedError(f'{name} in PyTorch takes no {", ".join(unknown)}')


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, **kwargs) -> tuple:
    whole('GLA', kwargs)
    return gated_delta_rule(q, k, v, gk if g is None else g, None)[0], None


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs) -> tuple:
    whole('DeltaNet', kwargs)
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q), normalised(k)
    return gated_delta_rule(q, k, v, torch.zeros_like(k[..., :1]), beta)[0], None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False, use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, **kwargs,
) -> tuple:
    """Of Gated DeltaNet, with `g` `[B, T, H]`, and of KDA, with `[B, T, H, K]`."""
    whole('the gated delta rule', kwargs)
    if use_gate_in_kernel:
        g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        g = -A_log.exp().view(-1, *[1] * (g.dim() - 3)) * F.softplus(g)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid()
    beta = 2 * beta if allow_neg_eigval else beta
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q), normalised(k)
    # heads of values share queries and keys
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    return gated_delta_rule(q, k, v, g.view(*g.shape[:3], -1), beta)[0], None


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor, dt_bias: Tensor,
    dt_softplus: bool, return_final_states: bool, dt_limit: tuple[float, float] = (0., math.inf), **kwargs,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence: GLA with queries `C`, keys `B`, values `dt x` and the decay `dt A`.

    Args:
        x (Tensor): `[B, T, H, V]`; dt (Tensor): `[B, T, H]`; A, dt_bias (Tensor): `[H]`.
        B, C (Tensor): `[B, T, groups, K]`, each for `H / groups` heads.
        D (Tensor): `[H]` or `[H, V]`.
    """
    whole('Mamba-2', kwargs)
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    q, k = (a.repeat_interleave(x.shape[2] // a.shape[2], 2) for a in (C, B))
    y, state = gated_delta_rule(q, k, dt[..., None] * x, (dt * A)[..., None], None, scale=1.)
    return (y + D.view(len(A), -1) * x).contiguous(), state.mT


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
