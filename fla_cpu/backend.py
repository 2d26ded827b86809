"""The CPU as one more backend of fla.

fla looks up alternative implementations of its low-level functions in a registry (`fla.backends`). The modules beside this
one declare plain PyTorch for CPU tensors, which :func:`fla_cpu.register` registers: fla's own autograd functions, modules and
losses then run without a GPU, and a call with a tensor elsewhere is not affected. `FLA_CPU=0` switches these registrations
off and `FLA_DISABLE_BACKEND_DISPATCH=1` the whole registry, both leaving fla as it comes. `FLA_CPU_LOOPS=0` leaves to PyTorch
what loops compiled by Numba serve.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import chain
from types import ModuleType

import torch
from fla.backends import BaseBackend


class CPUBackend(BaseBackend):
    """PyTorch on the CPU. It is asked first because no other backend serves a CPU tensor."""

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
    """Decorate what stands in for a function of fla that its registry does not know."""
    def declare(replacement: Callable) -> Callable:
        REPLACEMENTS.append((owner, name, replacement))
        return replacement

    return declare


def require(name: str, x: torch.Tensor | None) -> torch.Tensor:
    """An argument that fla lets a caller leave out, and always hands over."""
    if x is None:
        raise ValueError(f'{name} must be a tensor, got None')
    return x


# those of `fla_cpu.numba.memory.BITS`
LOOP_DTYPES = (torch.float32, torch.bfloat16)


def load_loops(*tensors: torch.Tensor | None) -> ModuleType | None:
    """:mod:`fla_cpu.loops` where these are dense float32 or bfloat16 on the CPU and Numba is installed.

    Who asks knows that they have memory (:func:`fla_cpu.plain.has_memory`).
    """
    for x in tensors:
        if x is not None and (x.dtype not in LOOP_DTYPES or not x.is_cpu or not x.is_contiguous()):
            return None
    return import_loops() if os.environ.get('FLA_CPU_LOOPS') != '0' else None


@cache
def import_loops() -> ModuleType | None:
    return None if find_spec('numba') is None else importlib.import_module('fla_cpu.loops')


def widen_for_loops(x: torch.Tensor) -> torch.Tensor:
    """`x` as the loops can take it, and else as `widen` returns it."""
    return x if x.dtype in LOOP_DTYPES else widen(x)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype to compute in: float32, as fla's kernels do, but float64 stays so that gradients can be checked."""
    return x if x.dtype == torch.float64 else x.float()
