"""Operators on meta tensors as on a GPU: what Longhorn's launch, and fla's as the absent device would get them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fla_longhorn.ops.operator import longhorn_bwd, longhorn_fwd, longhorn_update

# on meta tensors, the dispatcher would call their fake implementations
KERNELS: dict[Any, Callable] = {op._opoverload: op._init_fn for op in (longhorn_fwd, longhorn_bwd, longhorn_update)}


class LonghornKernels(TorchDispatchMode):
    """Longhorn's operators launch their kernels on meta tensors too."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return KERNELS.get(function, function)(*args, **(kwargs or {}))


class OfOneDevice(list):
    """What fla keeps for each device by its number, which tensors without data have none of."""

    def __getitem__(self, index):
        return super().__getitem__(0 if index is None else index)


def operator(module: str, name: str) -> Callable:
    """One of `fla.ops`, which takes the tiles that fit the shared memory of the device that is announced."""
    hardware = importlib.import_module('fla.utils.hardware')
    known = hardware.get_all_max_shared_mem()
    hardware.get_all_max_shared_mem = lambda: OfOneDevice(known)
    return getattr(importlib.import_module(f'fla.ops.{module}'), name)
