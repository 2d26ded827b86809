"""The implementations of the operators, and which of them runs: Triton kernels, PyTorch, or loops of a package for the CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool


class Backend(Protocol):
    """A module with these functions, on checked arguments and without autograd."""

    __name__: str

    def longhorn_fwd(
        self, args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None,
        pool: Pool | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`o [B, T, H, V]`, the final state and `states [S, H, K, V]`, empty where they are not requested.

        `parallel` allows splitting sequences. The final state is written to `final_state`, which may be the initial one, or to
        the rows of `pool`. States are saved by the rules of `checkpoints.py`.
        """

    def longhorn_bwd(
        self, do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of `DIFFERENTIABLE`, each like its input, `None` where the input is absent."""

    def view_states(self, states: Tensor, args: Arguments) -> Tensor:
        """Saved states as `[S, H, K, V]`."""


# name -> imports the module; others are added
OP_BACKENDS: dict[str, Callable[[], object]] = {'triton': partial(importlib.import_module, f'{__package__}.triton')}
# name -> whether it is installed and can run, for those that are registered
CPU_BACKENDS: dict[str, Callable[[], bool]] = {}


def register_cpu_backend(name: str, load: Callable[[], object], is_available: Callable[[], bool]) -> None:
    """Add a backend for the CPU alone, which becomes the default there where `is_available()`; `load()` imports it."""
    OP_BACKENDS[name], CPU_BACKENDS[name] = load, is_available
    backend_name.cache_clear()
    load_backend.cache_clear()


def select_backend(device: torch.device) -> Backend:
    """The implementation for tensors on `device`.

    `FLA_LONGHORN_BACKEND` (a name in `OP_BACKENDS`) selects one; if it cannot run there, this raises and never falls back.
    """
    return load_backend(backend_name(device.type, os.environ.get('FLA_LONGHORN_BACKEND')))


@cache
def backend_name(device_type: str, asked: str | None) -> str:
    # Triton reads it once too, when it meets the kernels
    interpreting = os.environ.get('TRITON_INTERPRET') == '1'
    name = asked or default_backend(device_type, interpreting)
    if name not in OP_BACKENDS:
        raise ValueError(f'FLA_LONGHORN_BACKEND must be one of {sorted(OP_BACKENDS)}, got {name!r}')
    if name == 'triton' and device_type == 'cpu' and not interpreting:
        raise ValueError('FLA_LONGHORN_BACKEND=triton runs on a GPU, or on the CPU with TRITON_INTERPRET=1; q is on the CPU')
    if name in CPU_BACKENDS and device_type != 'cpu':
        raise ValueError(f'FLA_LONGHORN_BACKEND={name} runs on the CPU; q is on {device_type}')
    return name


def default_backend(device_type: str, interpreting: bool) -> str:
    """Triton on an accelerator or in its interpreter; on the CPU a registered backend that is available, else PyTorch's."""
    if device_type != 'cpu' or interpreting:
        return 'triton'
    last = 'torch' if 'torch' in OP_BACKENDS else 'triton'
    return next((name for name, is_available in CPU_BACKENDS.items() if is_available()), last)


@cache
def load_backend(name: str) -> Backend:
    return cast(Backend, OP_BACKENDS[name]())


def backend_of(args: Arguments) -> Backend:
    return select_backend(args.q.device)


# set by a package for the CPU: its loops of a decoded token, or None where they are switched off
find_token_loops: Callable[[], Any] | None = None
