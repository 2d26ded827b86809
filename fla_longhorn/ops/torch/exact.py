"""The exact update on a strip of tokens in PyTorch, token by token.

    P_t = d_t * S_{t-1},    r_t = v_t - k_t^T P_t,    S_t = P_t + k_t (x) (eps_t * r_t)

float32 with time first: q, k `[L, B, H, K]`, v, eps, decay `[L, B, H, V]`, S `[B, H, K, V]`.
"""

from __future__ import annotations

import torch


def strip_forward(q, k, v, eps, S, decay=None):
    """`y_t = q_t^T S_t` of L tokens from the initial state `S`, and the final state."""
    states, _ = strip_states(k, v, eps, S, decay)
    return read(q, states[1:]), states[-1]


def strip_end(k, v, eps, S, decay=None):
    """The final state of the strip."""
    return strip_states(k, v, eps, S, decay)[0][-1]


def strip_states(k, v, eps, S, decay=None):
    """The states `[L + 1, B, H, K, V]` around L tokens, and the residuals `[L, B, H, V]`."""
    states, residuals = [S], []
    for t, (k_t, v_t, eps_t) in enumerate(zip(k, v, eps, strict=True)):
        P = states[-1] if decay is None else decay[t][..., None, :] * states[-1]
        residuals.append(v_t - read(k_t, P))
        states.append(torch.addcmul(P, k_t[..., None], (eps_t * residuals[-1])[..., None, :]))
    return torch.stack(states), torch.stack(residuals)


def strip_backward(q, k, v, eps, dy, S, G, decay=None):
    """Return `(dq, dk, du, deps, y)`, with a decay dg too, and the gradient of `S`; `G` is that of the final state.

    With `G_t` the gradient of `S_t`, `u = eps r`, `du = k^T G_t` and `w = eps du`, that of `P_t` is `G_t - k (x) w`,
    `dk = sum_v G_t u - P_t w` (without the part through eps), `deps = du r` and, of the decay's logarithm,
    `dg = sum_j (G_t - k w) P_t`.
    """
    S, R = strip_states(k, v, eps, S, decay)
    P = S[:-1] if decay is None else S[:-1] * decay[..., None, :]
    dk, du, dg = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    for t in reversed(range(len(k))):
        G = torch.addcmul(G, q[t][..., None], dy[t][..., None, :])
        du[t] = read(k[t], G)
        w = eps[t] * du[t]
        dk[t] = ((eps[t] * R[t])[..., None, :] * G - w[..., None, :] * P[t]).sum(-1)
        G = torch.addcmul(G, k[t][..., None], w[..., None, :], value=-1)
        if decay is not None:
            dg[t] = (G * P[t]).sum(-2)
            G = decay[t][..., None, :] * G
    dq = (S[1:] @ dy[..., None])[..., 0]
    return (dq, dk, du, du * R, read(q, S[1:]), *([] if decay is None else [dg])), G


def read(k, S):
    """`k^T S`, `[..., V]`."""
    return (k[..., None, :] @ S)[..., 0, :]
