"""Longhorn's operators on meta tensors, launching as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from fla_longhorn.modules import dispatch
from fla_longhorn.ops.autograd import longhorn_bwd, longhorn_fwd
from fla_longhorn.ops.update import longhorn_update

# on meta tensors, the dispatcher would call their fake implementations
KERNELS: dict[Any, Callable] = {op._opoverload: op._init_fn for op in (longhorn_fwd, longhorn_bwd, longhorn_update)}


class LonghornKernels(TorchDispatchMode):
    """Longhorn's operators and modules launch their kernels on meta tensors too."""

    def __enter__(self) -> LonghornKernels:
        self.has_values = has_values = dispatch.has_values
        dispatch.has_values = lambda x: x.is_meta or has_values(x)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        dispatch.has_values = self.has_values
        super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return KERNELS.get(function, function)(*args, **(kwargs or {}))
