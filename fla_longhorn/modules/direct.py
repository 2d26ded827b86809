"""Functions of fla and parameters without dispatch, guards and autograd.

fla's functions choose a backend at each call, and have guards and autograd. A plain call
(:func:`fla_cpu.plain.is_plain`) needs the function that would run in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from typing import Any

import torch
import torch.nn as nn
from fla import backends
from fla.utils import custom_device_ctx

from fla_cpu.backend import CPUBackend


@cache
def find_function(entry_point: Callable, device_type: str) -> Callable:
    """What the dispatched `entry_point` of fla runs for tensors on such a device, with keyword arguments that are dense.

    It is `entry_point` itself where other backends than those for the CPU are asked at each call whether they serve it.
    """
    function, registries = unwrap(entry_point), backends._function_registries
    for backend in registries[function]._get_sorted_backends() if function in registries else []:
        if not (backend.is_available() and backend.is_enabled()):
            continue
        if not isinstance(backend, CPUBackend):
            return entry_point
        if device_type == 'cpu' and backend.implementation is not None:
            return unwrap(backend.implementation)
    return entry_point if device_type == 'cpu' else on_its_device(function)


def on_its_device(function: Callable) -> Callable:
    """`function`, whose kernels start on the device of `x`."""
    def run(*, x: torch.Tensor, **kwargs: Any) -> Any:
        with custom_device_ctx(x.device.index):
            return function(x=x, **kwargs)

    return run


def get_parameter(module: nn.Module, name: str) -> Any:
    """`getattr` without `nn.Module.__getattr__`, which takes a microsecond and here serves what replaced a parameter."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def get_child(module: nn.Module, name: str) -> Any:
    """The same for a module."""
    modules = module._modules
    return modules[name] if name in modules else getattr(module, name)
