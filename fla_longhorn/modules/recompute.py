"""Calls of which backward recomputes the values that are cheap to recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fla_longhorn.modules.dispatch import is_bare


class Values:
    """What a call of :class:`Recompute` saves, and how it recomputes the values passed to :meth:`add`."""

    def __init__(self, device: str) -> None:
        self.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self.tensors: list[Tensor | None] = []
        # by their memory, which is not given to other tensors as long as it is a key
        self.places: dict[torch.UntypedStorage, int] = {}
        self.modules: list[tuple[Callable[..., Tensor], nn.Module, type[nn.Module], slice]] = []
        # in backward alone
        self.saved: tuple[Tensor | None, ...] = ()
        self.done: dict[int, Tensor] = {}

    def add(self, module: nn.Module, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Recompute `y` as `function(module, *inputs)`, which calls `forward` of a copy with the module's weights of now."""
        if y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes:
            self.places[y.untyped_storage()] = len(self.modules)
            where = slice(len(self.tensors), len(self.tensors) + len(inputs) + 2)
            self.modules.append((function, module, type(module), where))
            self.tensors += [*inputs, module.weight, module.bias]  # type: ignore[list-item]

    def pack(self, x: Tensor) -> Any:
        value = self.places.get(x.untyped_storage())
        if value is not None and x._version == 0:
            return value, x.shape, x.stride(), x.storage_offset()
        self.tensors.append(x.detach())
        return len(self.tensors) - 1

    def unpack(self, x: Any) -> Tensor:
        return self.get(x[0]).as_strided(*x[1:]) if isinstance(x, tuple) else self.saved[x]

    def get(self, value: int) -> Tensor:
        if value not in self.done:
            function, module, cls, where = self.modules[value]
            *inputs, weight, bias = self.saved[where]
            copied = object.__new__(cls)
            # Python finds these attributes before it asks the module for its parameters
            vars(copied).update(vars(module), weight=weight, bias=bias)
            with torch.no_grad(), torch.autocast(*self.autocast):
                self.done[value] = function(copied, *inputs)
        return self.done[value]


class Recompute(torch.autograd.Function):
    """`function(values)`, a tensor, for gradients of `inputs`, which are all tensors that it depends on and differentiates."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Values], Tensor], *inputs: Tensor) -> Tensor:
        ctx.values = values = Values(inputs[0].device.type)
        with torch.enable_grad(), saved_tensors_hooks(values.pack, values.unpack):
            o = function(values)
        values.places.clear()
        ctx.save_for_backward(*values.tensors)
        values.tensors = []
        ctx.edges = get_gradient_edge(o), [get_gradient_edge(x) for x in inputs if x.requires_grad]
        return o.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        ctx.values.saved, (o, inputs) = ctx.saved_tensors, ctx.edges
        try:
            found = iter(torch.autograd.grad(o, inputs, do, retain_graph=True, allow_unused=True))
        finally:
            ctx.values.saved, ctx.values.done = (), {}
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])


def can_recompute(x: Tensor, *modules: nn.Module) -> bool:
    """Whether `x`, which has memory, or a module is trained, the modules are bare, and hooks on saved tensors are allowed."""
    if x.is_meta or not any(y.requires_grad for y in (x, *(p for module in modules for p in module.parameters()))):
        return False
    try:
        with saved_tensors_hooks(Tensor.detach, Tensor.detach):
            return all(is_bare(module, x.device) for module in modules)
    except RuntimeError:
        return False
