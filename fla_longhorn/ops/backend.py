"""The one place that decides which implementation of the Longhorn ops serves a device."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

import torch

OP_BACKENDS = {
    'triton': 'fla_longhorn.ops.triton',
    'numba': 'fla_longhorn.ops.numba',
    'torch': 'fla_longhorn.ops.torch',
}


def select_backend(device: torch.device) -> ModuleType:
    """The module with `longhorn_fwd` and `longhorn_bwd` for tensors on `device`.

    `FLA_LONGHORN_BACKEND` (triton, numba, torch) asks for one by name; one that can't serve raises, and never falls back.
    """
    name = backend_name(device.type)
    if name not in OP_BACKENDS:
        raise ValueError(f'FLA_LONGHORN_BACKEND must be one of {sorted(OP_BACKENDS)}, got {name!r}')
    interpreting = os.environ.get('TRITON_INTERPRET') == '1'
    if name == 'triton' and device.type == 'cpu' and not interpreting:
        raise ValueError('FLA_LONGHORN_BACKEND=triton runs on a GPU, or on the CPU with TRITON_INTERPRET=1; q is on the CPU')
    if name == 'numba' and device.type != 'cpu':
        raise ValueError(f'FLA_LONGHORN_BACKEND=numba runs on the CPU; q is on {device}')
    return load_backend(name)


def backend_name(device_type: str) -> str:
    return os.environ.get('FLA_LONGHORN_BACKEND') or default_backend(device_type)


def serves_by_numba(device_type: str) -> bool:
    return backend_name(device_type) == 'numba'


def default_backend(device_type: str) -> str:
    """Triton on an accelerator or under its interpreter; on the CPU Numba where it is installed, else PyTorch."""
    if device_type != 'cpu' or os.environ.get('TRITON_INTERPRET') == '1':
        return 'triton'
    return 'numba' if has_numba() else 'torch'


@cache
def has_numba() -> bool:
    return importlib.util.find_spec('numba') is not None


@cache
def load_backend(name: str) -> ModuleType:
    try:
        return importlib.import_module(OP_BACKENDS[name])
    except ModuleNotFoundError as error:
        if error.name != 'numba':
            raise
        raise ModuleNotFoundError("the numba backend needs Numba: pip install 'fla-longhorn[cpu]'", name='numba') from error
