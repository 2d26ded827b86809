"""The diagonal update on a strip of tokens in PyTorch: all that is independent of the state, then one `addcmul_` per token.

    S_t = a_t * S_{t-1} + k_t (x) u_t,    a_t = 1 - k_t^2 (x) eps_t,    u_t = eps_t * v_t

A decay, `[L, B, H, V]` like v, is a factor of a_t.

float32 with time first: q, k `[L, B, H, K]`, v, eps `[L, B, H, V]`, S `[B, H, K, V]`.
"""

from __future__ import annotations

import torch


def strip_forward(q, k, v, eps, S, decay=None):
    """`y_t = q_t^T S_t` of L tokens from the initial state `S`, and the final state."""
    states = strip_states(k, v, eps, S, decay)[0]
    return (q[..., None, :] @ states[1:])[..., 0, :], states[-1]


def strip_end(k, v, eps, S, decay=None):
    """The final state of the strip."""
    return strip_states(k, v, eps, S, decay)[0][-1]


def strip_states(k, v, eps, S, decay=None):
    """The states `[L + 1, B, H, K, V]` around L tokens, from `S [B, H, K, V]`, and the decays `a [L, B, H, K, V]`."""
    a = 1 - k.square()[..., None] * eps[..., None, :]
    if decay is not None:
        a *= decay[..., None, :]
    states = k.new_empty(k.shape[0] + 1, *S.shape)
    states[0] = S
    torch.mul(k[..., None], (eps * v)[..., None, :], out=states[1:])
    for t in range(k.shape[0]):
        states[t + 1].addcmul_(a[t], states[t])
    return states, a


def strip_backward(q, k, v, eps, dy, S, G, decay=None):
    """Return `(dq, dk, du, deps, y)` and the gradient of the initial state `S`; `G` is that of the final state.

    With `G_t` the gradient of `S_t` and `r = v - k * S_{t-1}`: `dq = sum_v dy S_t`, `du = sum_j G_t k`,
    `deps = sum_j G_t k r`, `dk = sum_v eps G_t (r - k S_{t-1})` (without the part through eps) and `y = sum_j q S_t`.
    With a decay d, `d S_{t-1}` stands for `S_{t-1}` in these, and the gradient of log d, `sum_j G_t a S_{t-1}`, comes last.
    """
    S, a = strip_states(k, v, eps, S, decay)
    dS = q[..., None] * dy[..., None, :]
    dS[-1] += G
    for t in reversed(range(k.shape[0] - 1)):
        dS[t].addcmul_(a[t + 1], dS[t + 1])
    G = a[0] * dS[0]
    y = (q[..., None, :] @ S[1:])[..., 0, :]
    dq = (S[1:] @ dy[..., None])[..., 0]
    P = S[:-1] if decay is None else S[:-1] * decay[..., None, :]
    r = torch.addcmul(v[..., None, :], k[..., None], P, value=-1)
    du = (k[..., None, :] @ dS)[..., 0, :]
    deps = (k[..., None, :] @ (dS * r))[..., 0, :]
    dg = () if decay is None else ((dS * a * S[:-1]).sum(-2),)
    dk = (dS * r.addcmul_(k[..., None], P, value=-1) @ eps[..., None])[..., 0]
    return (dq, dk, du, deps, y, *dg), G
