"""A module's parameters and children without `nn.Module.__getattr__`, which takes a microsecond: for decoding."""

from __future__ import annotations

from typing import Any

import torch.nn as nn


def get_parameter(module: nn.Module, name: str) -> Any:
    """`getattr`, which here serves only what replaced a parameter."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def get_child(module: nn.Module, name: str) -> Any:
    """The same for a module."""
    modules = module._modules
    return modules[name] if name in modules else getattr(module, name)
