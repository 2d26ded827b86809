"""When a fused function may take a linear layer's weight without calling the layer."""

from __future__ import annotations

import torch
import torch.nn as nn

HOOKS = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')


def is_bare(linear: nn.Module, device: torch.device) -> bool:
    """Whether a call of `linear` is `x @ weight.T + bias` on `device` and nothing else.

    Not so where libraries put something of theirs in: adapters, quantisation and parametrisations change the class,
    accelerate sets an attribute `forward` and leaves the weights elsewhere until it is called, others register hooks.
    """
    if type(linear) is not nn.Linear or 'forward' in linear.__dict__ or any(getattr(linear, name) for name in HOOKS):
        return False
    return linear.weight.device == device
