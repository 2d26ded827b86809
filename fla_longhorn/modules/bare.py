"""Whether a call of a module is its function of the weights and nothing else, which may then run in its place."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

from fla_longhorn.modules.convolution import ShortConvolution

_FORWARDS = {cls: cls.forward for cls in (nn.Linear, ShortConvolution)}


def is_bare(module: nn.Module, device: torch.device) -> bool:
    """Whether a call of a linear layer or a convolution on `device` is what its class says and nothing else.

    Not so where libraries put something of theirs in: adapters, quantisation and parametrisations change the class,
    accelerate sets an attribute `forward` and leaves the weights elsewhere until it is called, others register hooks.
    """
    cls = type(module)
    if cls not in _FORWARDS or cls.forward is not _FORWARDS[cls] or 'forward' in module.__dict__:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return not _has_any_global_hook() and module.weight.device == device
