"""Modules that torch.fx records as one call, because it cannot trace into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn as nn
from torch.fx import Proxy

from fla_longhorn import modules


def in_one_call(forward: Callable) -> Callable:
    """Wrap a module's `forward` so that every tracer of torch.fx records a call of the module, as for modules of torch.nn.

    A list of leaf modules does not serve: `torch.fx.symbolic_trace`, timm and torchvision each have their own tracer.
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
