"""Longhorn with a decay, on the operator that has none.

With a decay `exp(g_t)` of each channel's state before the step, and the cumulative sum `G_t` of `g` from a piece's start,
`exp(-G_t) S_t` follows the recurrence without a decay with the values `exp(-G_t) v_t`. So pieces of 16 tokens are the present
operator on scaled values, with outputs and end states times `exp(G)`. One decay for each head is one for each of its channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType

import torch
import torch.nn.functional as F
from fla.layers import gated_deltanet, kda
from torch import Tensor, nn

from experiments import chunkwise
from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import chunk_longhorn

PIECE = 16
# decays of a token, at the start: half-lives of 70 to 700 tokens
DT_MIN, DT_MAX = 1e-3, 1e-2
# of a token's logarithm, so that 16 of them stay in float32's range
LOWEST = -5.


def gated_longhorn(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, doubled: bool = False, exact: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, H, V]` and the last state `[B, H, K, V]`.

    Args:
        q, k (Tensor): `[B, T, H, K]`.
        v (Tensor): `[B, T, H, V]`.
        beta (Tensor): Step sizes, `[B, T, H, V]` or `[B, T, H]`.
        g (Tensor, Optional): The decay's logarithm, -5 to 0 a token, `[B, T, H, V]` or `[B, T, H, 1]`.
        doubled (bool): Whether steps are twice as long.
        exact (bool): The update.
        initial_state (Tensor, Optional): `[B, H, K, V]`.
    """
    options = dict(exact=exact, allow_neg_eigval=doubled, output_final_state=True)
    if g is None:
        return chunk_longhorn(q, k, v, beta, initial_state=initial_state, **options)
    state, outputs = initial_state, []
    for q_i, k_i, v_i, beta_i, g_i in zip(*(x.split(PIECE, 1) for x in (q, k, v, beta, g)), strict=True):
        G = g_i.cumsum(1)
        o, state = chunk_longhorn(q_i, k_i, v_i * (-G).exp(), beta_i, initial_state=state, **options)
        outputs.append(o * G.exp())
        state = state * G[:, -1, :, None].exp()
    return torch.cat(outputs, 1), state


class Gate(nn.Module):
    """`-softplus(W x + dt_bias)` for each channel or each head, from the values `[B, T, H, V]` and at least -5.

    `W` has the rank of the projection to beta. `dt_bias` starts with decays from 1e-3 to 1e-2 in equal ratios, or halfway.
    """

    def __init__(self, layer: Longhorn, kind: str, std: float) -> None:
        super().__init__()
        self.heads, channels = layer.num_heads, layer.intermediate_size
        outputs = {'head': self.heads, 'channel': channels}[kind]
        self.down, self.up = nn.Linear(channels, layer.beta_rank, bias=False), nn.Linear(layer.beta_rank, outputs, bias=False)
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=std)
        shares = (torch.arange(outputs) + 0.5) / outputs
        dt = torch.exp(math.log(DT_MIN) + shares * math.log(DT_MAX / DT_MIN))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, v: Tensor) -> Tensor:
        g = F.softplus(self.up(self.down(v.flatten(2))) + self.dt_bias)
        return -g.clamp(max=-LOWEST).unflatten(-1, (self.heads, -1))


def add_gate(layer: Longhorn, kind: str | None, doubled: bool, std: float) -> None:
    """Have a layer decay its state and double its steps when it trains on whole sequences."""
    gate = layer.gate = Gate(layer, kind, std) if kind else None

    def op(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, D: Tensor, z: Tensor, exact: bool, **kwargs) -> tuple[Tensor, None]:
        o, _ = gated_longhorn(q, k, v, beta.sigmoid(), None if gate is None else gate(v), doubled, exact)
        return (o + D * v) * F.silu(z), None

    layer.op_for = lambda q_len: op


def chunk_scalar_longhorn(q: Tensor, k: Tensor, beta: Tensor, **kwargs) -> tuple[Tensor, None]:
    """The gated delta rule with Longhorn's step of one beta per head, and keys and queries as they are."""
    beta = beta.sigmoid()
    kwargs |= {'use_qk_l2norm_in_kernel': False, 'use_beta_sigmoid_in_kernel': False}
    return chunkwise.chunk_gated_delta_rule(q, k, beta=beta / (1 + beta * k.square().sum(-1)), **kwargs)


def with_operator(forward: Callable, operator: Callable) -> Callable:
    """Gated DeltaNet's `forward` with another operator."""
    names = dict.fromkeys(('chunk_gated_delta_rule', 'fused_recurrent_gated_delta_rule'), operator)
    return FunctionType(forward.__code__, vars(gated_deltanet) | names, forward.__name__, forward.__defaults__)


# `qk_norm='longhorn'` of NVlabs/GatedDeltaNet: a gate and a beta for each head, the exact update
scalar_longhorn_forward = with_operator(gated_deltanet.GatedDeltaNet.forward, chunk_scalar_longhorn)


def set_gate_rank(layer: kda.KimiDeltaAttention, rank: int, std: float) -> None:
    """KDA's two low-rank projections with another rank than a head's values have, so that its size can be another's."""
    for low in (layer.f_proj, layer.g_proj):
        down, up = low
        low[0] = nn.Linear(down.in_features, rank, bias=False)
        low[1] = nn.Linear(rank, up.out_features, bias=up.bias is not None)
        for linear in low:
            nn.init.normal_(linear.weight, std=std)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
