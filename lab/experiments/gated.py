"""The models of recall that starts anew: Longhorn with a gate from a start of its own, and the gated scalar form."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType

import torch
from fla.layers import gated_deltanet, kda
from torch import Tensor, nn

from fla_longhorn.layers import Longhorn
from fla_longhorn.layers.options import Gate
from lab.experiments import chunkwise

# minus the logarithm of a token's decay, at the start: half-lives of 70 to 700 tokens
DT_MIN, DT_MAX = 1e-3, 1e-2


@torch.no_grad()
def add_gate(layer: Longhorn, kind: str, std: float) -> None:
    """Have a layer decay its state by its own gate, of other weights and decays than the layer's option starts from.

    The projection is drawn with the standard deviation `std`; decays start as :func:`slow_decays` says.
    """
    channels = layer.head_v_dim if kind == 'channel' else None
    gate = layer.gate = Gate(layer.intermediate_size, layer.beta_rank, layer.num_heads, channels)
    for linear in (gate.down, gate.up):
        nn.init.normal_(linear.weight, std=std)
    slow_decays(gate)


@torch.no_grad()
def slow_decays(gate: Gate) -> None:
    """Have a gate's decays start from 1e-3 to 1e-2 in equal ratios, half-lives of 70 to 700 tokens."""
    shares = (torch.arange(len(gate.dt_bias)) + 0.5) / len(gate.dt_bias)
    dt = torch.exp(math.log(DT_MIN) + shares * math.log(DT_MAX / DT_MIN))
    gate.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


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
