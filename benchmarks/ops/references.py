"""Every operator's recurrence, token by token in float64: the reference for its results."""

from __future__ import annotations

import torch

from fla_longhorn.ops import naive_recurrent_longhorn


def recurrence(q, k, v, decay=None, beta=None, delta=False, scale=None) -> torch.Tensor:
    r"""`S_t = decay_t * S_{t-1} + k_t (x) beta_t (v_t - [delta] k_t^T (decay_t * S_{t-1}))`, `o_t = scale q_t^T S_t`.

    q, k are `[B, T, H, K]`, v is `[B, T, H, V]`, `decay` is a function of t whose result broadcasts to `[B, H, K, V]`, `beta`
    broadcasts to the shape of v; `scale` is `K ** -0.5` by default, as in fla.
    """
    S = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        S = S if decay is None else decay(t) * S
        u = v[:, t] - (k[:, t, :, :, None] * S).sum(-2) if delta else v[:, t]
        u = u if beta is None else beta[:, t] * u
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outputs.append((q[:, t, :, :, None] * S).sum(-2))
    return (k.shape[-1] ** -0.5 if scale is None else scale) * torch.stack(outputs, 1)


def gla(q, k, v, g):
    return recurrence(q, k, v, decay=lambda t: g[:, t].exp()[..., None])


def delta_rule(q, k, v, beta):
    return recurrence(q, k, v, beta=beta if beta.dim() == 4 else beta[..., None], delta=True)


def delta_rule_head_first(q, k, v, beta):
    return delta_rule(*(x.transpose(1, 2) for x in (q, k, v, beta))).transpose(1, 2)


def gated_delta_rule(q, k, v, g, beta):
    """With one decay per head (Gated DeltaNet) or per entry of its keys (KDA)."""
    g = g[..., None] if g.dim() == 4 else g[..., None, None]
    return recurrence(q, k, v, decay=lambda t: g[:, t].exp(), beta=beta[..., None], delta=True)


def hgrn(x, g):
    one = torch.ones_like(x[:, :, None, :1])
    return recurrence(one, one, x[:, :, None], decay=lambda t: g[:, t, None, None].exp()).squeeze(2)


def selective_scan(u, delta, A, B, C):
    """Mamba's, channels before time: u, delta `[B, C, T]`, A `[C, K]`, B and C `[B, K, T]`."""
    u, delta, B, C = (x.transpose(1, 2)[:, :, None] for x in (u, delta, B, C))
    o = recurrence(C, B, delta * u, decay=lambda t: (delta[:, t, :, None] * A.mT).exp(), scale=1.0)
    return o.squeeze(2).transpose(1, 2)


def mamba2_scan(x, dt, A, B, C):
    """Mamba-2's: x `[B, T, H, V]`, dt `[B, T, H]`, A `[H]`, and B and C `[B, T, 1, K]` shared by the heads."""
    B, C = (y.expand(-1, -1, x.shape[2], -1) for y in (B, C))
    return recurrence(C, B, dt[..., None] * x, decay=lambda t: (dt[:, t] * A).exp()[..., None, None], scale=1.0)


def online_scan(u, Q, K, T):
    """The authors' Longhorn, channels before time, with the logits of the step sizes in T."""
    u, Q, K, T = (x.transpose(1, 2)[:, :, None] for x in (u, Q, K, T))
    return naive_recurrent_longhorn(Q, K, u, T.sigmoid())[0].squeeze(2).transpose(1, 2)


def longhorn(exact: bool):
    def reference(q, k, v, beta):
        return naive_recurrent_longhorn(q, k, v, beta, exact=exact)[0]
    return reference
