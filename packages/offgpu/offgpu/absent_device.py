"""A Triton driver for an absent GPU: all that Triton needs before it would run a kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver


@dataclass(frozen=True)
class Device:
    """A device of a target: bytes of shared memory that a block may have, registers of a multiprocessor."""

    target: GPUTarget
    name: str
    shared_memory: int
    multiprocessors: int
    registers: int = 65536

    @property
    def properties(self) -> dict[str, int]:
        """As Triton's drivers report them."""
        return {
            'max_shared_mem': self.shared_memory, 'multiprocessor_count': self.multiprocessors,
            'max_num_regs': self.registers, 'warpSize': self.target.warp_size,
        }


def cuda(arch: int, name: str, kilobytes: int, multiprocessors: int) -> Device:
    """`kilobytes` of a multiprocessor's shared memory for a block: all but one."""
    return Device(GPUTarget('cuda', arch, 32), name, 1024 * kilobytes, multiprocessors)


def hip(arch: str, name: str, kilobytes: int, multiprocessors: int) -> Device:
    return Device(GPUTarget('hip', arch, 64), name, 1024 * kilobytes, multiprocessors, 131072)


DEVICES = {
    'sm_80': cuda(80, 'NVIDIA A100-SXM4-80GB', 163, 108),
    'sm_86': cuda(86, 'NVIDIA GeForce RTX 3090', 99, 82),
    'sm_89': cuda(89, 'NVIDIA GeForce RTX 4090', 99, 128),
    'sm_90': cuda(90, 'NVIDIA H100 80GB HBM3', 227, 132),
    'sm_100': cuda(100, 'NVIDIA B200', 227, 148),
    'sm_120': cuda(120, 'NVIDIA GeForce RTX 5090', 99, 170),
    'sm_121': cuda(121, 'NVIDIA GB10', 99, 48),
    'gfx942': hip('gfx942', 'AMD Instinct MI300X', 64, 304),
    'gfx950': hip('gfx950', 'AMD Instinct MI350X', 160, 256),
}
TARGETS = {name: device.target for name, device in DEVICES.items()}


class AbsentDevice(DriverBase):
    """Compiles for `target` and receives launches with tensors on `tensors`; subclasses define what a launch does.

    `load_binary` turns machine code into the function of a launch. Triton caches kernels by the number `device`.
    """

    def __init__(self, target: str, load_binary: Callable, *, tensors: str, device: int) -> None:
        self.target, self.tensors, self.device = target, tensors, device
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: DEVICES[target].properties,
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
    about, capability = DEVICES[active.target], divmod(int(active.target[3:]), 10)
    answers = {
        'get_device_name': about.name, 'get_device_capability': capability, 'device_count': 1, 'current_device': 0,
        'device': nullcontext(),
        'get_device_properties': SimpleNamespace(
            name=about.name, major=capability[0], minor=capability[1],
            multi_processor_count=about.multiprocessors, shared_memory_per_block_optin=about.shared_memory,
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
