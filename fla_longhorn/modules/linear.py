"""Whether a call of a linear layer is a product and nothing else, which fused kernels may then do in its place."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

_FORWARD = nn.Linear.forward


def is_bare(linear: nn.Module, device: torch.device) -> bool:
    """Whether a call of `linear` is `x @ weight.T + bias` on `device` and nothing else.

    Not so where libraries put something of theirs in: adapters, quantisation and parametrisations change the class,
    accelerate sets an attribute `forward` and leaves the weights elsewhere until it is called, others register hooks.
    """
    if type(linear) is not nn.Linear or nn.Linear.forward is not _FORWARD or 'forward' in linear.__dict__:
        return False
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return False
    return not _has_any_global_hook() and linear.weight.device == device
