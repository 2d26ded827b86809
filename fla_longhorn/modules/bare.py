"""Whether a module's weights may be used directly instead of calling the module."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch.nn.modules.module import _has_any_global_hook

from fla_longhorn.modules.convolution import ShortConvolution
from fla_longhorn.modules.norm import L2Norm
from fla_longhorn.ops.plain import ORDINARY

_FORWARDS: dict[type[nn.Module], Callable] = {cls: cls.forward for cls in (nn.Linear, ShortConvolution, L2Norm, nn.Identity)}


def is_bare(module: nn.Module, device: torch.device) -> bool:
    """Whether calling a linear layer, a convolution or a norm of keys on `device` runs its class's forward and nothing else.

    Libraries change that: adapters, quantisation and parametrisations replace the class or that of the weight, accelerate sets
    an attribute `forward` and keeps the weights elsewhere until the call, others register hooks.
    """
    forward = _FORWARDS.get(type(module))
    if forward is None or not is_unchanged(module, forward):
        return False
    weight = getattr(module, 'weight', None)
    return weight is None or (type(weight) in ORDINARY and weight.device == device)


def is_unchanged(module: nn.Module, forward: Callable) -> bool:
    """Whether calling `module` runs `forward`, that of its class as it was made, and nothing else."""
    if type(module).forward is not forward or 'forward' in module.__dict__:
        return False
    # private, as is the function below, but nothing public tells of hooks: without these, those of a user would not be called,
    # and what they change would be computed again without them
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return not _has_any_global_hook()
