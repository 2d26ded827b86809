"""What torch.fx records as one call of a module, for it can not look into it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn as nn
from torch.fx import Proxy

from fla_longhorn import modules


def in_one_call(forward: Callable) -> Callable:
    """A module's `forward` that every tracer of torch.fx records as a call of the module, as it does those of torch.nn.

    `torch.fx.symbolic_trace` and the feature extraction of timm and torchvision have tracers of their own.
    """
    @wraps(forward)
    def run(self: nn.Module, x: torch.Tensor | Proxy, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Proxy):
            tracer: Any = x.tracer
            return tracer.create_proxy('call_module', tracer.path_of_module(self), (x, *args), kwargs)
        return forward(self, x, *args, **kwargs)

    return run


class RMSNorm(modules.RMSNorm):
    forward = in_one_call(modules.RMSNorm.forward)
