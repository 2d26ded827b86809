"""A linear layer's product without a call of the layer, where that is all a call does."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

from fla_longhorn.modules.direct import get_parameter
from fla_longhorn.ops.plain import are_ordinary

_FORWARD = nn.Linear.forward


def is_bare(linear: nn.Module, device: torch.device) -> bool:
    """Whether a call of `linear` is `x @ weight.T + bias` on `device` and nothing else.

    Not so where libraries put something of theirs in: adapters, quantisation and parametrisations change the class,
    accelerate sets an attribute `forward` and leaves the weights elsewhere until it is called, others register hooks.
    """
    return _is_untouched(linear) and linear.weight.device == device


def _is_untouched(linear: nn.Module) -> bool:
    if type(linear) is not nn.Linear or nn.Linear.forward is not _FORWARD or 'forward' in linear.__dict__:
        return False
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return False
    return not _has_any_global_hook()


def project(linear: nn.Module, rows: torch.Tensor, as_tokens: bool = True) -> torch.Tensor:
    """`linear` of `rows` `[B, D]`, for half the time of a call where that is bare and its parameters ordinary tensors.

    Else it is called: with one token of each row `[B, 1, D]`, which is what adapters and hooks expect, or with the rows. So it
    is under autocast, which remembers the weights that it has cast for a linear layer, and not for a product.
    """
    if _is_untouched(linear) and not torch._C._is_any_autocast_enabled():
        weight, bias = get_parameter(linear, 'weight'), get_parameter(linear, 'bias')
        if are_ordinary(weight, bias):
            return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return linear(rows.unsqueeze(1)).squeeze(1) if as_tokens else linear(rows)
