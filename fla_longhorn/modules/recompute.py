"""Values that backward computes again, so that autograd does not keep them.

PyTorch's hooks on saved tensors see what each function keeps for its backward. A tensor in the memory of a value that can be
computed again is replaced by its place in that value; all others are kept, by the hooks around these where there are some:
those of activation checkpointing, of offloading or of a profiler.

Between forward and backward a module may be given other weights, hooks or adapters: a value is computed by the module as it
was, and raises where the weights themselves have changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from fla_cpu.plain import is_recorded
from fla_longhorn.modules.bare import is_bare

_autograd: Any = torch._C._autograd


def can_recompute() -> bool:
    """Whether a backward may follow in which values can be computed again.

    A compiler chooses by itself what to compute again; transforms of `torch.func` and traces have no hooks on saved tensors.
    """
    return is_recorded() and _autograd._saved_tensors_hooks_is_enabled()


class Kept:
    """A tensor that backward needs: packed by the hooks around, or the tensor itself with its version."""

    def __init__(self, x: Tensor, hooks: tuple[Callable, Callable] | None) -> None:
        self.hooks = hooks
        self.version = x._version
        self.x = x if hooks is None else hooks[0](x)

    def get(self) -> Tensor:
        if self.hooks is not None:
            return self.hooks[1](self.x)
        # with hooks, autograd leaves this check to them
        if self.x._version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: '
                f'{list(self.x.shape)} is at version {self.x._version}; expected version {self.version} instead'
            )
        return self.x


class Value:
    """A value that is recomputed when the first of its places is unpacked, and dropped after the last one."""

    def __init__(
        self, function: Callable[..., Tensor], module: nn.Module, inputs: list[Kept | None], x: Tensor,
    ) -> None:
        self.function, self.module, self.inputs = function, as_now(module), inputs
        self.weights = [Kept(y, None) for y in self.module.parameters()]
        self.autocast, self.dtype, self.version = autocast_as_now(x.device.type), x.dtype, x._version
        self.x: Tensor | None = None
        self.places = self.asked = 0

    def get(self) -> Tensor:
        if self.x is None:
            for weight in self.weights:
                weight.get()
            inputs = [None if kept is None else kept.get() for kept in self.inputs]
            with torch.no_grad(), self.autocast():
                self.x = self.function(self.module, *inputs)
        x, self.asked = self.x, self.asked + 1
        if self.asked == self.places:
            self.x, self.asked = None, 0
        return x


def as_now(module: nn.Module) -> nn.Module:
    """A module with the weights that `module` has now; call its `forward`, for the hooks are those of `module`."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module), _parameters=module._parameters.copy())
    return copied


class Place(NamedTuple):
    """A tensor in the memory of a value."""

    value: Value
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any

    def get(self) -> Tensor:
        return self.value.get().as_strided(self.size, self.stride, self.offset)


class Recompute:
    """A context in which autograd saves the inputs of the values passed to :meth:`add` in their place."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.values: dict[int, Value] = {}
        # while tensors are packed, no other tensor is given a value's memory
        self.storages: list[torch.UntypedStorage] = []
        # PyTorch calls the innermost hooks only
        self.hooks = _autograd._top_saved_tensors_default_hooks(True) if enabled else None

    def __enter__(self) -> Recompute:
        if self.enabled:
            _autograd._push_saved_tensors_default_hooks(self.pack, get)
        return self

    def __exit__(self, *error: object) -> None:
        self.storages.clear()
        if self.enabled:
            _autograd._pop_saved_tensors_default_hooks()

    def add(self, module: nn.Module, x: Tensor, function: Callable[..., Tensor], *inputs: Tensor | None) -> None:
        """`x` is what a call of `module` gave, which must be bare: `function(module, *inputs)`, by the module's `forward`."""
        if not (self.enabled and is_bare(module, x.device) and x.is_contiguous()):
            return
        storage = x.untyped_storage()
        if storage.nbytes() != x.nbytes:
            return
        kept = [None if y is None else Kept(y.detach(), self.hooks) for y in inputs]
        self.values[storage._cdata] = Value(function, module, kept, x)
        self.storages.append(storage)

    def pack(self, x: Tensor) -> Kept | Place:
        # not the address of the memory, which is 0 on `meta`
        value = self.values.get(x.untyped_storage()._cdata)
        # an earlier version is not what was changed in place since
        if value is None or value.dtype != x.dtype or value.version != x._version:
            return Kept(x, self.hooks)
        value.places += 1
        return Place(value, x.shape, x.stride(), x.storage_offset())


def get(kept: Kept | Place) -> Tensor:
    return kept.get()


def autocast_as_now(device_type: str) -> Callable[[], AbstractContextManager]:
    """Makes a context in which autocast is as it is now."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    return partial(
        torch.autocast, device_type, torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type), torch.is_autocast_cache_enabled(),
    )
