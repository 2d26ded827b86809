"""Values that backward recomputes, so that autograd does not save them.

PyTorch's hooks on saved tensors see each tensor that a function saves for its backward. A view of a value that can be
recomputed is replaced by its place in the value. All other tensors are saved, through the next outer hooks if there are any
(activation checkpointing, offloading, a profiler).

Between forward and backward a module may get other weights, hooks or adapters. A value is recomputed by the module as it was
in forward; weights that were changed in place raise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fla_longhorn.modules.bare import is_bare
from fla_longhorn.ops.plain import is_recorded

# private, and nothing public says which hooks are around: without it, activation checkpointing and offloading would not get
# what a layer saves, and its memory would stay taken
outer_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def can_recompute() -> bool:
    """Whether autograd records and its hooks work: not in traces, where the compiler recomputes, nor in `torch.func`."""
    if not is_recorded():
        return False
    try:
        with saved_tensors_hooks(Tensor.detach, Tensor.detach):
            return True
    except RuntimeError:
        # `disable_saved_tensors_hooks` forbids it here
        return False


class Kept:
    """A saved tensor: packed by the outer hooks, or the tensor itself with its version."""

    def __init__(self, x: Tensor, hooks: tuple[Callable, Callable] | None) -> None:
        self.hooks = hooks
        self.version = x._version
        self.x = x if hooks is None else hooks[0](x)

    def get(self) -> Tensor:
        if self.hooks is not None:
            return self.hooks[1](self.x)
        # autograd's own check, which it skips for hooked tensors
        if self.x._version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: '
                f'{list(self.x.shape)} is at version {self.x._version}; expected version {self.version} instead'
            )
        return self.x


class Value:
    """A value that is recomputed when its first place is unpacked, and freed after the last one."""

    def __init__(self, function: Callable[..., Tensor], module: nn.Module, inputs: list[Kept | None], x: Tensor) -> None:
        self.function, self.module, self.inputs = function, as_now(module), inputs
        self.weights = [Kept(y, None) for y in module.parameters()]
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
    """A copy of `module` with its current weights. It shares the hooks, so call its `forward`."""
    copied = object.__new__(type(module))
    # Python finds these attributes before it asks the module for its parameters
    vars(copied).update(vars(module), weight=module.weight, bias=module.bias)
    return copied


class Place(NamedTuple):
    """A view of a value."""

    value: Value
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any

    def get(self) -> Tensor:
        return self.value.get().as_strided(self.size, self.stride, self.offset)


class Recompute:
    """A context in which autograd does not save the values passed to :meth:`add`, but recomputes them from their inputs."""

    def __init__(self) -> None:
        # by their memory, which is not given to other tensors as long as it is a key
        self.values: dict[torch.UntypedStorage, Value] = {}
        # PyTorch calls only the innermost hooks, so these call the ones around them
        self.hooks = outer_hooks(True)

    def __enter__(self) -> Recompute:
        self.context = saved_tensors_hooks(self.pack, methodcaller('get'))
        self.context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.values.clear()
        self.context.__exit__(*error)
        # the context refers to this object, which a cycle would keep
        del self.context

    def add(self, module: nn.Module, x: Tensor, function: Callable[..., Tensor], *inputs: Tensor | None) -> None:
        """Recompute `x`, the output of a call of `module`, as `function(module, *inputs)`; ignored unless `module` is bare.

        `function` calls the module's `forward`.
        """
        if not (is_bare(module, x.device) and x.is_contiguous()):
            return
        storage = x.untyped_storage()
        if storage.nbytes() != x.nbytes:
            return
        kept = [None if y is None else Kept(y.detach(), self.hooks) for y in inputs]
        self.values[storage] = Value(function, module, kept, x)

    def pack(self, x: Tensor) -> Kept | Place:
        value = self.values.get(x.untyped_storage())
        # recomputing gives the value before changes in place
        if value is None or value.dtype != x.dtype or value.version != x._version:
            return Kept(x, self.hooks)
        value.places += 1
        return Place(value, x.shape, x.stride(), x.storage_offset())


def autocast_as_now(device_type: str) -> Callable[[], AbstractContextManager]:
    """A factory of contexts with the current settings of autocast."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    return partial(
        torch.autocast, device_type, torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type), torch.is_autocast_cache_enabled(),
    )
