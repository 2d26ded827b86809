"""Where a module computes, fla's kernels, loops of a package for the CPU or PyTorch; and calls that backward recomputes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules.module import _has_any_global_hook

from fla_longhorn.ops import operator
from fla_longhorn.ops.arguments import ORDINARY, is_transformed

# `find_loops(*tensors)`, set by a package that makes fla's functions run on the CPU, returns its loops for tensors of a plain
# call (:func:`fla_longhorn.ops.arguments.is_plain`), or None
find_loops: Callable[..., ModuleType | None] | None = None


def has_values(x: torch.Tensor) -> bool:
    """Whether `x` has values to read and memory for kernels: not in a trace or a transform, nor a fake or meta tensor."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():
        return False
    return type(x) in ORDINARY and not x.is_meta


def in_pytorch(x: torch.Tensor) -> bool:
    """Whether a module computes `x` in PyTorch: kernels need memory, and on the CPU a package that has them."""
    return not has_values(x) or (find_loops is None and x.is_cpu)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the compute dtype: float32, as in fla's kernels; float64 stays float64 for gradient checks."""
    return x if x.dtype == torch.float64 else x.float()


def mix_layer(
    layer: nn.Module, x: Tensor, z: Tensor, conv_state: Tensor, recurrent_state: Tensor,
) -> Tensor | None:
    """By a loop: the input `[B, 1, d]` of a layer's last projection, for a token, given the halves of its first one's output.

    The states are updated in place. None, with nothing changed, if there is no such loop, or none for these tensors, or if a
    part of the layer is not as its constructor made it.
    """
    if operator.find_token_loops is None or torch.compiler.is_compiling() or not x.is_cpu:
        return None
    loops = operator.find_token_loops()
    return None if loops is None else loops.mix_layer(layer, x, z, conv_state, recurrent_state)


# the forward of each class, as it was made; other modules add theirs
FORWARDS: dict[type[nn.Module], Callable] = {cls: cls.forward for cls in (nn.Linear, nn.Identity)}


def is_bare(module: nn.Module, device: torch.device) -> bool:
    """Whether calling `module` on `device` runs its class's forward, one of :data:`FORWARDS`, and nothing else.

    Libraries change that: adapters, quantisation and parametrisations replace the class or that of the weight, accelerate sets
    an attribute `forward` and keeps the weights elsewhere until the call, others register hooks.
    """
    forward = FORWARDS.get(type(module))
    if forward is None or type(module).forward is not forward or 'forward' in module.__dict__:
        return False
    # private, as is the function below, but nothing public tells of hooks: without these, those of a user would not be called
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    parameters = module._parameters.values()
    return not _has_any_global_hook() and all(x is None or (type(x) in ORDINARY and x.device == device) for x in parameters)


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
    """Whether the modules are bare, `x` has memory, and hooks on saved tensors are allowed here."""
    if x.is_meta:
        return False
    try:
        with saved_tensors_hooks(Tensor.detach, Tensor.detach):
            return all(is_bare(module, x.device) for module in modules)
    except RuntimeError:
        return False
