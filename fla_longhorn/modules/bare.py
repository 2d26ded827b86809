"""Which modules a layer may compute without calling them: those that nothing was put in or around."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from fla_longhorn.ops.plain import ORDINARY

# classes of weights whose memory holds the values that a layer multiplies
KNOWN = (*ORDINARY, FakeTensor)
# the forward of each class, as it was made; other modules add theirs
FORWARDS: dict[type[nn.Module], Callable] = {cls: cls.forward for cls in (nn.Linear, nn.Identity)}


def is_bare(module: nn.Module, device: torch.device | None = None) -> bool:
    """Whether calling `module` on `device` runs its class's forward, one of :data:`FORWARDS`, and nothing else.

    Libraries change that: adapters, quantisation and parametrisations replace the class or that of the weight, accelerate sets
    an attribute `forward` and keeps the weights elsewhere until the call, others register hooks. Without `device`, the weights
    are the caller's to check.
    """
    forward = FORWARDS.get(type(module))
    if forward is None or type(module).forward is not forward or 'forward' in module.__dict__:
        return False
    # private, as is the function below, but nothing public tells of hooks: without these, those of a user would not be called
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if _has_any_global_hook():
        return False
    if device is None:
        return True
    # those of a replica, or that another network computed, are plain tensors
    weights = [*module._parameters.values(), *(x for x in module.__dict__.values() if isinstance(x, Tensor))]
    return all(x is None or (type(x) in KNOWN and x.device == device) for x in weights)
