"""Choose the implementation of the Longhorn operators for a device."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

import torch

OP_BACKENDS = ('triton', 'numba', 'torch')


def select_backend(device: torch.device) -> ModuleType:
    """The module with `longhorn_fwd` and `longhorn_bwd` for tensors on `device`.

    `FLA_LONGHORN_BACKEND` (triton, numba, torch) selects one; if it cannot run there, this raises and never falls back.
    """
    name, interpret = os.environ.get('FLA_LONGHORN_BACKEND'), os.environ.get('TRITON_INTERPRET')
    return load_backend(backend_name(device.type, name, interpret))


@cache
def backend_name(device_type: str, asked: str | None, interpret: str | None) -> str:
    name = asked or default_backend(device_type, interpret)
    if name not in OP_BACKENDS:
        raise ValueError(f'FLA_LONGHORN_BACKEND must be one of {sorted(OP_BACKENDS)}, got {name!r}')
    if name == 'triton' and device_type == 'cpu' and interpret != '1':
        raise ValueError('FLA_LONGHORN_BACKEND=triton runs on a GPU, or on the CPU with TRITON_INTERPRET=1; q is on the CPU')
    if name == 'numba' and device_type != 'cpu':
        raise ValueError(f'FLA_LONGHORN_BACKEND=numba runs on the CPU; q is on {device_type}')
    return name


def default_backend(device_type: str, interpret: str | None) -> str:
    """Triton on an accelerator or in its interpreter; on the CPU Numba if it is installed, else PyTorch."""
    if device_type != 'cpu' or interpret == '1':
        return 'triton'
    return 'torch' if importlib.util.find_spec('numba') is None else 'numba'


@cache
def load_backend(name: str) -> ModuleType:
    try:
        return importlib.import_module(f'{__package__}.{name}')
    except ModuleNotFoundError as error:
        if error.name != 'numba':
            raise
        raise ModuleNotFoundError("the numba backend needs Numba: pip install 'fla-longhorn[cpu]'", name='numba') from error
