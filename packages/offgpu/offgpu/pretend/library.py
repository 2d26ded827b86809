"""The compiled device and its functions that cannot raise; those that can are operators in `torch.ops.pretend`."""

from __future__ import annotations

import ctypes
from typing import Any

LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
LAUNCH_AGAIN = ctypes.CFUNCTYPE(None, ctypes.c_long)
# `load` sets it once
lib: Any = None


def load() -> None:
    """Before libtorch_cpu, which it brings along, so that its symbols win."""
    from offgpu.pretend.build import library

    global lib
    path = library()
    if not path.exists():
        raise RuntimeError('the pretend device is not compiled for this torch: python -m offgpu.pretend.build')
    lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    lib.pretend_counts.restype = ctypes.c_char_p
    for name in ('allocated', 'peak', 'allocations', 'get_stream'):
        getattr(lib, f'pretend_{name}').restype = ctypes.c_long


def get() -> Any:
    if lib is None:
        raise RuntimeError('the pretend device is not installed')
    return lib
