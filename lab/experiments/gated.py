"""Gates from another start, and KDA with another rank, so that models have equal sizes."""

from __future__ import annotations

import math

import torch
from fla.layers import kda
from torch import nn

from fla_longhorn.layers.gate import Gate

# minus the logarithm of a token's decay, at the start: half-lives of 70 to 700 tokens
DT_MIN, DT_MAX = 1e-3, 1e-2


@torch.no_grad()
def slow_decays(gate: Gate) -> None:
    """Have a gate's decays start from 1e-3 to 1e-2 in equal ratios, half-lives of 70 to 700 tokens."""
    shares = (torch.arange(len(gate.dt_bias)) + 0.5) / len(gate.dt_bias)
    dt = torch.exp(math.log(DT_MIN) + shares * math.log(DT_MAX / DT_MIN))
    gate.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


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
