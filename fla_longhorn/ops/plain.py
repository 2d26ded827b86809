"""Which calls are plain: eager, without derivatives, on ordinary tensors.

A plain call can bypass the dispatcher and run the kernels directly, with the same results: nothing records it, differentiates
it, or replaces its tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

ORDINARY = (Tensor, torch.nn.Parameter)
# private, as is the level of forward mode, because PyTorch has no public equivalents: without these checks, a kernel would run
# unseen by `torch.func` and forward mode, which would give wrong derivatives, or by a counter of FLOPs. What
# `torch.utils._python_dispatch` says of modes is one flag for all threads
under_transform = torch._C._are_functorch_transforms_active
dispatch_modes = torch._C._len_torch_dispatch_stack


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of `torch.func` or forward mode is active, the latter for one of `tensors` where some are given.

    fla's functions support neither, nor compilers. Callers check `torch.compiler.is_compiling()` themselves: after a graph
    break, this function would be compiled alone.
    """
    if under_transform():
        return True
    if forward_ad._current_level < 0:
        return False
    return not tensors or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_recorded() -> bool:
    """Whether autograd may record the call, with hooks on saved tensors, and no compiler, transform or trace does."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed() or torch.jit.is_tracing():
        return False
    # private, as the only public way to ask is to try
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def is_plain(*tensors: object) -> bool:
    """Whether the call is plain: nothing intercepts it, and each of `tensors` is `None` or has memory to read from.

    Not plain are: enabled gradients, needed or not; forward-mode differentiation, `torch.func`; `torch.compile`,
    `torch.export`, `torch.jit.trace`; modes of `__torch_function__` and `__torch_dispatch__`, such as fake tensors'; tensor
    subclasses, meta tensors and negated views.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or under_transform() or forward_ad._current_level >= 0:
        return False
    if torch.jit.is_tracing() or dispatch_modes() or has_torch_function(tensors):
        return False
    # a generator is slower
    for x in tensors:  # noqa: SIM110
        if x is not None and (type(x) not in ORDINARY or x.is_meta or x.is_neg()):  # type: ignore[attr-defined]
            return False
    return True
