"""Where a module computes: in fla's kernels or in PyTorch; on the CPU also in loops of a package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla_longhorn.ops import backends
from fla_longhorn.ops.plain import ORDINARY, is_transformed


def has_values(x: torch.Tensor) -> bool:
    """Whether `x` has values to read and memory for kernels: not in a trace or a transform, nor a fake or meta tensor."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed():
        return False
    return type(x) in ORDINARY and not x.is_meta


def in_pytorch(x: torch.Tensor) -> bool:
    """Whether a module computes `x` in PyTorch: kernels need memory; on the CPU they are a package's."""
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
