"""The layer's gate: how much of its memory a token keeps before it writes; and parameters without weight decay."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fla_longhorn.modules.dispatch import FORWARDS
from fla_longhorn.ops.gate import log_decays

GATES = (None, 'head', 'channel')
# tokens until half of a memory is left, before training
HALF_LIVES = (7.0, 700.0)


# parameters without weight decay: `D`, as in the authors' code, which decays matrices only, and those of a gate. A layer marks
# each with `_no_weight_decay`, which training code for Mamba reads and FSDP2 loses; a model returns their names from
# `no_weight_decay()`, as timm's models do
class NoWeightDecay(nn.Module):
    """A layer with parameters without weight decay."""

    no_weight_decay: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.mark_no_weight_decay()

    def _apply(self, *args, **kwargs) -> Self:
        # `to_empty` makes new parameters
        super()._apply(*args, **kwargs)
        self.mark_no_weight_decay()
        return self

    def __setstate__(self, state: dict) -> None:
        # deepcopy of a parameter drops its attributes
        super().__setstate__(state)
        self.mark_no_weight_decay()

    def mark_no_weight_decay(self) -> None:
        own: dict[str, Any] = dict(self.named_parameters(recurse=False))
        for name in own.keys() & set(self.no_weight_decay):
            own[name]._no_weight_decay = True


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters of `model` without weight decay, also after FSDP2 has replaced them."""
    layers = ((name, x) for name, x in model.named_modules() if isinstance(x, NoWeightDecay))
    return {f'{name}.{parameter}'.lstrip('.') for name, x in layers for parameter in x.no_weight_decay}


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
