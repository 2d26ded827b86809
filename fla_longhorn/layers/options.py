"""Checks of the layer's options; its gate, which says how much of its memory a token keeps before it writes."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Self

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, distribute_tensor

from fla_longhorn.modules.dispatch import FORWARDS
from fla_longhorn.ops.inputs import MAX_STATE_SIZE

MODES = ('chunk', 'fused_recurrent')
GATES = (None, 'head', 'channel')
# tokens until half of a memory is left, before training
HALF_LIVES = (7.0, 700.0)


def check_options(
    *, mode: Any, hidden_size: Any, state_size: Any, expand: Any, num_heads: Any, conv_size: Any, beta_rank: Any, k_norm: Any,
    norm_eps: Any, layer_idx: Any = None, allow_neg_eigval: Any = False, gate: Any = None, **flags: Any,
) -> None:
    """Raise `TypeError` (wrong type) or `ValueError` (wrong value) that names the option; `flags` must be bool."""
    if mode not in MODES:
        raise ValueError(f'mode must be one of {list(MODES)}, got {mode!r}')
    check_integer('hidden_size', hidden_size)
    check_integer('state_size', state_size, most=MAX_STATE_SIZE)
    check_integer('num_heads', num_heads)
    check_integer('conv_size', conv_size)
    for name, flag in (flags | {'allow_neg_eigval': allow_neg_eigval}).items():
        if not isinstance(flag, bool):
            raise TypeError(f'{name} must be True or False, got {flag!r}')
    check_number('expand', expand)
    channels = hidden_size * expand
    if channels < 1 or not math.isclose(channels, round(channels)):
        raise ValueError(f'expand * hidden_size must be a positive integer, got {expand} * {hidden_size}')
    if round(channels) % num_heads:
        raise ValueError(f'num_heads must divide expand * hidden_size = {round(channels)}, got {num_heads}')
    if k_norm not in (None, 'l2'):
        raise ValueError(f"k_norm must be None or 'l2', got {k_norm!r}")
    if gate not in GATES:
        raise ValueError(f"gate must be None, 'head' or 'channel', got {gate!r}")
    if beta_rank != 'auto' and (not is_integer(beta_rank) or beta_rank < 1):
        raise ValueError(f"beta_rank must be 'auto' or a positive integer, got {beta_rank!r}")
    if k_norm == 'l2' and allow_neg_eigval:
        warnings.warn(
            "allow_neg_eigval gives no negative eigenvalue with k_norm='l2': |k| = 1 and beta < 1 keep a doubled step below 1",
            stacklevel=3,
        )
    check_number('norm_eps', norm_eps)
    if layer_idx is not None:
        check_integer('layer_idx', layer_idx, least=0)


def misspelt(names: Iterable[str], options: Iterable[str], cutoff: float) -> dict[str, str]:
    """Those of `names` that are nearly an option, by `difflib`'s ratio, and which; `other_exact` is a name of its own."""
    options = tuple(options)
    apart = [name for name in names if not any(f'_{option}_' in f'_{name}_' for option in options)]
    near = {name: get_close_matches(name.lower(), options, 1, cutoff) for name in apart}
    return {name: found[0] for name, found in near.items() if found}


def rank_of(beta_rank: int | str, hidden_size: int) -> int:
    """The rank of the projection to the step sizes, Mamba's of `dt` where it is `'auto'`."""
    return math.ceil(hidden_size / 16) if beta_rank == 'auto' else int(beta_rank)


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    if not is_integer(value):
        raise TypeError(f'{name} must be an integer, got {value!r}')
    if value < least or (most is not None and value > most):
        wanted = f'at least {least}' if most is None else f'between {least} and {most}'
        raise ValueError(f'{name} must be {wanted}, got {value}')


def check_number(name: str, value: Any) -> None:
    """Positive and finite."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f'{name} must be a number, got {value!r}')
    if not 0 < float(value) < math.inf:
        raise ValueError(f'{name} must be positive and finite, got {value}')


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
