"""Whether a call is plain: eager, without derivatives, on ordinary tensors. The one place that decides it.

A plain call needs no operator, only the kernels behind it: nothing records it, differentiates it, or replaces its tensors.
Operators, modules and the layer ask here before they take the short way, which computes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

ORDINARY = (Tensor, torch.nn.Parameter)


# whether a transform of `torch.func` is at work
under_transform = torch._C._are_functorch_transforms_active


def is_transformed() -> bool:
    """The same, or forward mode: fla's functions serve neither, nor a compiler.

    `torch.compiler.is_compiling()` is asked beside it, not in here: behind a graph break, a function of its own is compiled.
    """
    return under_transform() or forward_ad._current_level >= 0


def is_recorded() -> bool:
    """Whether autograd may record the call, and no compiler, transform or trace of `torch.jit` does."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    return torch._C._get_tracing_state() is None


def is_plain(*tensors: object) -> bool:
    """Whether nothing watches the call, and each of `tensors` is `None` or has memory of its own to read from.

    Not plain are: gradients that are switched on, whether or not one is asked for; forward-mode differentiation, `torch.func`;
    `torch.compile`, `torch.export`, `torch.jit.trace`; modes of `__torch_function__` and `__torch_dispatch__`, such as fake
    tensors'; subclasses of tensors, meta tensors and views that negate.
    """
    return has_memory(*tensors) and not torch._C._len_torch_function_stack()


def has_memory(*tensors: object) -> bool:
    """The same where a mode of `__torch_function__` may watch: a kernel can stand in for PyTorch's functions on `tensors`."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or under_transform() or forward_ad._current_level >= 0:
        return False
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return False
    # a generator takes longer
    for x in tensors:  # noqa: SIM110
        if x is not None and (type(x) not in ORDINARY or x.is_meta or x.is_neg()):  # type: ignore[attr-defined]
            return False
    return True
