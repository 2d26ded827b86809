"""The layer's gate, which says how much of its memory a token keeps before it writes."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor

from fla_longhorn.layers.weight_decay import NoWeightDecay
from fla_longhorn.modules.bare import FORWARDS

# tokens until half of a memory is left, before training
HALF_LIVES = (7.0, 700.0)


def log_decays(g: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    r""":math:`-\exp(A_{log}) \, \mathrm{softplus}(g + dt_{bias})` in float32 or, for doubles, float64, as fla's KDA has it.

    g is `[B, T, H]` or `[B, T, H, V]`, A_log `[H]`, dt_bias `[H]` or `[H * V]`.
    """
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    x = g.to(dtype) + dt_bias.to(dtype).reshape(g.shape[2:])
    return -A_log.to(dtype).exp().view(-1, *[1] * (g.dim() - 3)) * F.softplus(x)


class Gate(NoWeightDecay):
    r"""Logarithms of decays from a layer's tokens, as fla's gated layers have them.

    .. math::
        g = -\exp(A_{log}) \odot \mathrm{softplus}(W_{up} W_{down} x + dt_{bias})

    Fresh decays have half-lives of 7 to 700 tokens, in equal ratios over the outputs. `A_log` and `dt_bias` have no weight
    decay.

    Args:
        input_size (int):
            Width of x.
        rank (int):
            Rank of the projection, that of the layer's step sizes.
        num_heads (int):
            Number of heads.
        num_channels (int, Optional):
            Decays of a head; `None` is one of the shape `[B, T, H]`. Default: `None`.
    """

    no_weight_decay = ('A_log', 'dt_bias')

    def __init__(
        self, input_size: int, rank: int, num_heads: int, num_channels: int | None = None, device=None, dtype=None,
    ) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads, self.num_channels = num_heads, num_channels
        outputs = num_heads * (num_channels or 1)
        self.down = nn.Linear(input_size, rank, bias=False, **dd)
        self.up = nn.Linear(rank, outputs, bias=False, **dd)
        self.A_log = nn.Parameter(torch.empty(num_heads, **dd))
        self.dt_bias = nn.Parameter(torch.empty(outputs, **dd))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of the gate's own parameters; submodules reset themselves."""
        nn.init.zeros_(self.A_log)
        # transformers lets its own functions of initialisation alone change no loaded parameter
        if getattr(self.dt_bias, '_is_hf_initialized', False):
            return
        least, most = (math.log(2) / tokens for tokens in reversed(HALF_LIVES))
        shares = (torch.arange(len(self.dt_bias), dtype=torch.float32, device=self.dt_bias.device) + 0.5) / len(self.dt_bias)
        rates = least * (most / least) ** shares
        # `softplus` of this bias is the rate
        bias = rates + torch.log(-torch.expm1(-rates))
        if isinstance(self.dt_bias, DTensor):
            bias = distribute_tensor(bias, self.dt_bias.device_mesh, self.dt_bias.placements, src_data_rank=None)
        self.dt_bias.copy_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From x `[B, T, input_size]` to g in float32, `[B, T, H]`, or `[B, T, H, num_channels]`."""
        g = self.up(self.down(x))
        if self.num_channels is not None:
            g = g.unflatten(-1, (len(self.A_log), -1))
        return log_decays(g, self.A_log, self.dt_bias)


FORWARDS[Gate] = Gate.forward
