"""The CPU as a backend of fla.

fla looks up alternative implementations of its low-level functions in a registry (`fla.backends`). The other modules of this
package implement them in PyTorch for CPU tensors, and :func:`fla_cpu.register` registers them. fla's own autograd functions,
modules and losses then run without a GPU; calls with tensors on other devices are not affected. `FLA_CPU=0` switches these
registrations off, `FLA_DISABLE_BACKEND_DISPATCH=1` the whole registry. `FLA_CPU_LOOPS=0` uses PyTorch instead of compiled
loops. `FLA_CPU` and `FLA_CPU_LOOPS` are read once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache, wraps
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from fla.backends import BaseBackend
from torch.autograd import forward_ad

from fla_kit.numba import compiles


class CPUBackend(BaseBackend):
    """PyTorch on the CPU. It has the highest priority because no other backend supports CPU tensors."""

    backend_type = 'cpu'
    env_var = 'FLA_CPU'
    priority = -1


def verify_cpu(*args, **kwargs) -> tuple[bool, str | None]:
    """Accept a call whose first tensor argument is on the CPU."""
    for value in chain(args, kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device.type == 'cpu', f'the first tensor is on {value.device}'
    return False, 'no tensor argument'


# (dispatched function of fla, its implementation here, the verifier) and (owner, name of a function, its replacement)
IMPLEMENTATIONS: list[tuple[Callable, Callable, Callable]] = []
REPLACEMENTS: list[tuple[ModuleType | type, str, Callable]] = []


def implements(entry_point: Callable, verifier: Callable = verify_cpu) -> Callable[[Callable], Callable]:
    """Decorate the CPU implementation of a dispatched function of fla."""
    def declare(implementation: Callable) -> Callable:
        IMPLEMENTATIONS.append((entry_point, implementation, verifier))
        return implementation

    return declare


def replaces(owner: ModuleType | type, name: str) -> Callable[[Callable], Callable]:
    """Decorate the replacement of a function of fla that is not in its registry."""
    def declare(replacement: Callable) -> Callable:
        REPLACEMENTS.append((owner, name, replacement))
        return replacement

    return declare


def differentiable_once(what: str, instead: str) -> Callable[[Callable], Callable]:
    """Decorate a backward pass of fla's `what`: with `create_graph=True`, which asks for a second one, it raises RuntimeError.

    fla's autograd functions save reshaped inputs, copies and statistics, and PyTorch takes those for constants: gradients of
    gradients would be without their terms, or zero. It is told at once, because gradients without a way to the inputs are not
    visited again.
    """
    message = f"fla's {what} has no second derivative (create_graph=True) on the CPU: {instead}"

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def run(*args: Any, **kwargs: Any) -> Any:
            # others may call it outside of a backward pass, which has a number
            if torch.is_grad_enabled() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:
                raise RuntimeError(message)
            return backward(*args, **kwargs)

        return run

    return decorate


def require(name: str, x: torch.Tensor | None) -> torch.Tensor:
    """An argument that is optional in fla's signature, but that fla always passes."""
    if x is None:
        raise ValueError(f'{name} must be a tensor, got None')
    return x


# the keys of `fla_kit.numba.memory.BITS`
LOOP_DTYPES = (torch.float32, torch.bfloat16)
# tensors of other classes may have no memory to read
ORDINARY = (torch.Tensor, torch.nn.Parameter)


def load_loops(*tensors: torch.Tensor | None) -> ModuleType | None:
    """:mod:`fla_cpu.loops` if Numba is installed and the tensors are dense float32 or bfloat16 on the CPU, else None.

    The caller has checked that they have memory (:func:`has_memory`).
    """
    for x in tensors:
        if x is not None and (x.dtype not in LOOP_DTYPES or not x.is_cpu or not x.is_contiguous()):
            return None
    return import_loops()


def has_memory(*tensors: torch.Tensor | None) -> bool:
    """Whether a loop can replace PyTorch's functions on `tensors`: nothing records, traces or transforms the call.

    `__torch_function__` modes are allowed.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    if forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return False
    # a generator is slower
    for x in tensors:  # noqa: SIM110
        if x is not None and (type(x) not in ORDINARY or x.is_meta or x.is_neg()):
            return False
    return True


@cache
def import_loops() -> ModuleType | None:
    """The loops, if Numba compiles; `FLA_CPU_LOOPS` is read at the first call."""
    return importlib.import_module('fla_cpu.loops') if compiles() and os.environ.get('FLA_CPU_LOOPS') != '0' else None


def widen_for_loops(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if the loops support its dtype, else `widen(x)`."""
    return x if x.dtype in LOOP_DTYPES else widen(x)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the compute dtype: float32, as in fla's kernels; float64 stays float64 for gradient checks."""
    return x if x.dtype == torch.float64 else x.float()
