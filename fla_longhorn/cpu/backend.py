"""The CPU as one more backend of fla.

fla looks up alternative implementations of its low-level functions in a registry (`fla.backends`). The modules beside this
one register plain PyTorch for CPU tensors, so fla's own autograd functions, modules and losses run without a GPU; a call
with a tensor elsewhere is not affected. `FLA_CPU=0` switches these registrations off and `FLA_DISABLE_BACKEND_DISPATCH=1`
the whole registry, both leaving fla as it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from fla.backends import BaseBackend, register


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


def register_cpu(entry_point: Callable, verifier: Callable = verify_cpu) -> Callable[[Callable], Callable]:
    """Decorate the CPU implementation of a dispatched function of fla. Registering again replaces it."""
    return register(entry_point, backend=CPUBackend, verifier=verifier)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype to compute in: float32, as fla's kernels do, but float64 stays so that gradients can be checked."""
    return x if x.dtype == torch.float64 else x.float()
