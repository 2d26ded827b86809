"""A Triton driver for an absent GPU: all that Triton needs before it would run a kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

TARGETS = {
    'sm_80': GPUTarget('cuda', 80, 32),
    'sm_90': GPUTarget('cuda', 90, 32),
    'sm_100': GPUTarget('cuda', 100, 32),
    'gfx942': GPUTarget('hip', 'gfx942', 64),
}
# limits of a block, and properties of an A100, H100, B200 and MI300X
SHARED_MEMORY = {'sm_80': 166912, 'sm_90': 232448, 'sm_100': 232448, 'gfx942': 65536}
MULTIPROCESSORS = {'sm_80': 108, 'sm_90': 132, 'sm_100': 148, 'gfx942': 304}
NAMES = {'sm_80': 'NVIDIA A100-SXM4-80GB', 'sm_90': 'NVIDIA H100 80GB HBM3', 'sm_100': 'NVIDIA B200'}


class AbsentDevice(DriverBase):
    """Compiles for `target` and receives launches with tensors on `tensors`; subclasses define what a launch does.

    `load_binary` turns machine code into the function of a launch. Triton caches kernels by the number `device`.
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


@contextmanager
def announced(active: AbsentDevice):
    """Make Triton and torch.cuda report the device: libraries choose their kernels' configurations by it.

    Some do so at import, so import them inside.
    """
    capability = divmod(int(active.target[3:]), 10)
    answers = {
        'get_device_name': NAMES[active.target], 'get_device_capability': capability, 'device_count': 1, 'current_device': 0,
        'device': nullcontext(),
        'get_device_properties': SimpleNamespace(
            name=NAMES[active.target], major=capability[0], minor=capability[1],
            multi_processor_count=MULTIPROCESSORS[active.target], shared_memory_per_block_optin=SHARED_MEMORY[active.target],
        ),
    }
    before = driver._active
    driver.set_active(active)
    try:
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
            yield
    finally:
        driver._active = before
