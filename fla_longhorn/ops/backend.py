"""Choose the implementation of the Longhorn operators for a device."""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from fla_kit.numba import compiles

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
    """Triton on an accelerator or in its interpreter; on the CPU Numba if it is there, else PyTorch."""
    if device_type != 'cpu' or interpret == '1':
        return 'triton'
    return 'numba' if compiles() else 'torch'


@cache
def load_backend(name: str) -> ModuleType:
    if name == 'numba' and find_spec('numba') and not compiles():
        raise ValueError('FLA_LONGHORN_BACKEND=numba needs Numba to compile, but NUMBA_DISABLE_JIT is set')
    try:
        return importlib.import_module(f'{__package__}.{name}')
    except ModuleNotFoundError as error:
        if error.name != 'numba':
            raise
        raise ModuleNotFoundError("the numba backend needs Numba: pip install 'fla-longhorn[cpu]'", name='numba') from error
