"""Triton launches on CPU tensors: compiled for an absent GPU, executed by a handler.

`emulated(target, handler)` makes Triton compile for `target` up to PTX (no ptxas) and call `handler(Launch)` instead of every
launch. Tensors are ordinary CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from packaging.version import Version
from triton.backends import backends
from triton.runtime.driver import driver

from offgpu.absent_device import TARGETS, AbsentDevice

# targets whose instructions are known
EMULATED = ('sm_80', 'sm_90')


@dataclass
class Launch:
    """One launch: the kernel's PTX, its grid, and its arguments in the order of the PTX's parameters."""

    name: str
    ptx: str
    grid: tuple[int, int, int]
    num_warps: int
    shared: int
    # (name, type in Triton's notation, tensor or number), without constexprs
    arguments: list[tuple[str, str, Any]]


class Driver(AbsentDevice):
    """Compiles for `target` and passes launches to `handler`."""

    def __init__(self, target: str, handler: Callable[[Launch], None]) -> None:
        super().__init__(target, load_binary, tensors='cpu', device=TARGETS[target].arch)
        self.handler = handler

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, ptx, packed, launch_metadata, enter_hook, exit_hook, *arguments):
            # Triton keeps this function with the compiled kernel, also for later drivers
            driver.active.handler(Launch(
                name=metadata.name, ptx=ptx, grid=(x, y, z), num_warps=metadata.num_warps, shared=metadata.shared,
                arguments=[
                    (name, kind, argument)
                    for (name, kind), argument in zip(source.signature.items(), arguments, strict=True) if kind != 'constexpr'
                ],
            ))
        return launch


def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple:
    """(module, function, registers, spills, most threads): the function is the PTX. Triton 3.3 knows no last one."""
    loaded = object(), binary.decode(), 0, 0, 1024
    return loaded if Version(triton.__version__) >= Version('3.4') else loaded[:-1]


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it waited for, such as ptxas."""
    return sum(os.times()[:4])


@contextmanager
def emulated(
    target: str, handler: Callable[[Launch], None], compiled: Callable[[str, float], None] | None = None, *,
    assemble: bool = False,
):
    """Compile launches for `target` ('sm_80', 'sm_90') and pass them to `handler`.

    `compiled` gets the name and the CPU seconds of each kernel that was not in Triton's cache; with `assemble` ptxas also
    makes machine code.
    """
    if os.environ.get('TRITON_INTERPRET') == '1':
        raise RuntimeError('TRITON_INTERPRET=1 makes kernels that do not compile')
    if target not in EMULATED:
        raise ValueError(f'target must be one of {list(EMULATED)}, got {target!r}')
    # Triton 3.3 loads its backends under other names than their modules'
    compiler = backends['nvidia'].compiler
    machine_code, started = compiler.make_cubin, [0.0]

    def compiling(self):
        """The backend's hash, which Triton reads when it starts to compile."""
        started[0] = cpu_seconds()
        return f'emulated-{self.target.arch}{"-assembled" * assemble}'

    def end(self, ptx, metadata, *options):
        if assemble:
            machine_code(self, ptx, metadata, *options)
        if compiled is not None:
            compiled(metadata['name'], cpu_seconds() - started[0])
        return ptx.encode()

    # do not create a driver that was not used before
    before = vars(driver).get('_active', vars(driver).get('active'))
    driver.set_active(Driver(target, handler))
    try:
        with (
            # machine code is not needed: the PTX replaces it, under its own name in Triton's cache
            mock.patch.object(compiler, 'make_cubin', end), mock.patch.object(compiler, 'hash', compiling),
        ):
            yield
    finally:
        driver.set_active(before)
