"""Rehearsal of launches: Triton kernels launched on a GPU that is not there.

Tensors are meta tensors, which have a shape and no data, and Triton's driver is replaced by one that takes every launch and
checks what a GPU would refuse: it compiles the kernel for what the arguments are (dtypes, alignment, None, flags that the
heuristics compute), and holds grid, shared memory, threads and integers against the target's limits. How deep it goes is a
matter of time: `launch` compiles nothing, `types` lets Triton's frontend go through the kernel, `code` makes the target's
machine code.

Only in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import triton
from triton._C.libtriton import ir
from triton.compiler import compile as triton_compile
from triton.compiler import make_backend
from triton.runtime.driver import driver

from offgpu.absent_device import AbsentDevice
from offgpu.compiled import TARGETS

# the same on all of them
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
DEPTHS = ('launch', 'types', 'code')
RANGES = {'i32': (-2**31, 2**31), 'i64': (-2**63, 2**63), 'u64': (0, 2**64)}


class Driver(AbsentDevice):
    """Triton's driver of a device that compiles for `target` and, in place of running, keeps and checks what it is given."""

    def __init__(self, target: str, depth: str) -> None:
        device = len(DEPTHS) * list(TARGETS).index(target) + DEPTHS.index(depth)
        super().__init__(target, load_binary, tensors='meta', device=device)
        self.depth, self.launches = depth, []

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *arguments):
            check_grid((x, y, z))
            check_arguments(source, arguments)
            self.launches.append(self.record(source, metadata, [x, y, z], function, arguments))
        return launch

    def record(self, source, metadata, grid: list[int], function: dict | None, arguments: tuple):
        """What to keep of a launch; `function` is what `load_binary` knows of its code."""
        launch = {'kernel': source.fn.__name__, 'grid': grid, 'enable_fp_fusion': metadata.enable_fp_fusion}
        if function is not None:
            launch |= function | {'num_warps': metadata.num_warps, 'shared': metadata.shared}
        return launch


@cache
def make_driver(target: str, depth: str) -> Driver:
    """One for all calls, for Triton keeps what it made with a driver."""
    return Driver(target, depth)


def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple:
    """(module, function, registers, spills, most threads) of a cubin; what the launch shall know of it is the function."""
    tool = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', 'cuobjdump')
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(binary)
        file.flush()
        command = [tool, '--dump-resource-usage', file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf'{key}:(\d+)', usage)[1]) for key in ('REG', 'STACK'))
    return object(), {'registers': registers, 'stack': stack}, registers, stack, MAX_THREADS


def check_grid(grid: tuple[int, ...]) -> None:
    for axis, size, most in zip('xyz', grid, MAX_GRID, strict=True):
        if not isinstance(size, int) or not 0 < size <= most:
            raise ValueError(f'grid.{axis} = {size} is not between 1 and {most}')


def check_arguments(source, arguments: tuple) -> None:
    """Refuse what Triton's launcher would: no tensor for a pointer, no number for a number, or one out of its range."""
    for (name, kind), x in zip(source.signature.items(), arguments, strict=True):
        if kind.startswith('*') and not hasattr(x, 'data_ptr'):
            raise TypeError(f'{name} is a pointer ({kind}), got {type(x).__name__}')
        if kind in RANGES and not (isinstance(x, int) and RANGES[kind][0] <= x < RANGES[kind][1]):
            raise TypeError(f'{name} is {kind}, got {x!r}')
        if kind.startswith('fp') and not isinstance(x, float):
            raise TypeError(f'{name} is {kind}, got {x!r}')


def check_types(source, target, options: dict) -> None:
    """What compiling begins with: Triton's frontend."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(options)
    source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


def compile_for_driver(source, target, options, **others):
    """Compile as deep as the active driver wants. A kernel keeps the function that it compiled with first, so there is one."""
    active = driver._active
    if not isinstance(active, Driver) or active.depth == 'code':
        return triton_compile(source, target=target, options=options, **others)
    if active.depth == 'types':
        check_types(source, target, options)
    launcher = active.launcher_cls(source, SimpleNamespace(**options))
    return SimpleNamespace(run=launcher, function=None, packed_metadata=None, launch_metadata=lambda *_: None)


@contextmanager
def rehearsal(target: str, depth: str, make: Callable[[str, str], Driver] = make_driver):
    """Have Triton launch on the `Driver` that `make` gives, whose `launches` are given."""
    before, compiler = driver._active, triton.compiler.compile
    active = make(target, depth)
    active.launches.clear()
    triton.compiler.compile = compile_for_driver
    driver.set_active(active)
    try:
        yield active.launches
    finally:
        driver._active, triton.compiler.compile = before, compiler
