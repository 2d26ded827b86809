"""Longhorn's operators on meta tensors, launching as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from fla_longhorn.modules import dispatch
from fla_longhorn.ops.autograd import longhorn_bwd, longhorn_fwd
from fla_longhorn.ops.update import longhorn_update

# on meta tensors, the dispatcher would call their fake implementations
KERNELS: dict[Any, Callable] = {op._opoverload: op._init_fn for op in (longhorn_fwd, longhorn_bwd, longhorn_update)}


@contextmanager
def launching_modules() -> Iterator[None]:
    """Longhorn's modules launch fla's kernels on meta tensors too, where they would compute in PyTorch."""
    has_values = dispatch.has_values
    with mock.patch.object(dispatch, 'has_values', lambda x: x.is_meta or has_values(x)):
        yield


class LonghornKernels(TorchDispatchMode):
    """Longhorn's operators and modules launch their kernels on meta tensors too."""

    def __enter__(self) -> LonghornKernels:
        self.modules = launching_modules()
        self.modules.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.modules.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return KERNELS.get(function, function)(*args, **(kwargs or {}))
