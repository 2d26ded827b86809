"""Where a module computes: in fla's kernels, in loops of a package for the CPU, or in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.modules.module import _has_any_global_hook

from fla_longhorn.ops import backends
from fla_longhorn.ops.plain import ORDINARY, is_transformed


def has_values(x: torch.Tensor) -> bool:
    """Whether `x` has values to read and memory for kernels: not in a trace or a transform, nor a fake or meta tensor."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():
        return False
    return type(x) in ORDINARY and not x.is_meta


def in_pytorch(x: torch.Tensor) -> bool:
    """Whether a module computes `x` in PyTorch: kernels need memory, and on the CPU a package that has them."""
    return not has_values(x) or (backends.loops is None and x.is_cpu)


def differentiable_once(y: Any, what: str) -> Any:
    """`y`, tensors that fla's kernels computed on a device: a gradient with `create_graph=True` raises RuntimeError.

    fla's functions have no second derivative and do not say so: PyTorch would take their gradients for constants.
    """
    def refuse(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(f"fla's {what} has no second derivative (create_graph=True): call torch.func")

    for x in y if isinstance(y, tuple) else (y,):
        # a package for the CPU says it by itself
        if x is not None and x.requires_grad and not x.is_cpu:
            x.register_hook(refuse)
    return y


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
    if backends.loops is None or torch.compiler.is_compiling() or not x.is_cpu:
        return None
    loops = backends.loops.of_token()
    return None if loops is None else loops.mix_layer(layer, x, z, conv_state, recurrent_state)


# classes of weights whose memory holds the values that a layer multiplies
KNOWN = (*ORDINARY, FakeTensor)
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
    # those of a replica, or that another network computed, are plain tensors
    weights = [*module._parameters.values(), *(x for x in module.__dict__.values() if isinstance(x, Tensor))]
    return not _has_any_global_hook() and all(x is None or (type(x) in KNOWN and x.device == device) for x in weights)
