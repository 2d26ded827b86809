"""A Triton driver of a GPU that is not there: all that Triton asks for before it would run a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
# of a block and of an A100, H100, B200 and MI300X
SHARED_MEMORY = {'sm_80': 166912, 'sm_90': 232448, 'sm_100': 232448, 'gfx942': 65536}
MULTIPROCESSORS = {'sm_80': 108, 'sm_90': 132, 'sm_100': 148, 'gfx942': 304}


class AbsentDevice(DriverBase):
    """What compiles for `target` and takes launches of tensors on `tensors`; a subclass says what a launch does.

    `load_binary` makes of machine code what a launch is given as its function. Triton caches kernels by the number `device`.
    """

    def __init__(self, target: str, load_binary: Callable, *, tensors: str, device: int) -> None:
        self.target, self.tensors, self.device = target, tensors, device
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                'max_shared_mem': SHARED_MEMORY[target], 'multiprocessor_count': MULTIPROCESSORS[target],
            },
            load_binary=load_binary, unload_module=lambda module: None,
        )

    def launcher_cls(self, source, metadata):
        raise NotImplementedError

    def get_current_target(self):
        return TARGETS[self.target]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self.tensors)

    def get_benchmarker(self):
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    @staticmethod
    def is_active() -> bool:
        return True
