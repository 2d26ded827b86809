"""Rehearsal: launches of Triton kernels, checked without a GPU.

Tensors are meta tensors. A replacement of Triton's driver captures every launch, compiles the kernel for its arguments
(dtypes, alignment, None, flags from heuristics) and checks grid, shared memory, threads and integers against the target's
limits. The depth is a choice: `launch` compiles nothing, `types` runs Triton's frontend, `memory` compiles as far as Triton
itself does, which lays out shared memory, `code` makes the target's machine code.

Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton._C.libtriton import ir
from triton.compiler import compile as triton_compile
from triton.compiler import make_backend
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from offgpu.absent_device import DEVICES, TARGETS, AbsentDevice
from offgpu.compiled import Compiled, count_amdgcn, count_sass
from offgpu.sass import Program, read_cubin

# the same on all targets
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
DEPTHS = ('launch', 'types', 'memory', 'code')
RANGES = {'i32': (-2**31, 2**31), 'i64': (-2**63, 2**63), 'u64': (0, 2**64)}


program_of = lru_cache(64)(read_cubin)


@dataclass
class Argument:
    """An argument, in the kernel's order: its Triton type, and its value or, for a tensor, its memory."""

    name: str
    kind: str
    value: object = None
    nbytes: int = 0
    storage: int = 0
    offset: int = 0
    # keeps the storage alive, so that its address is not reused
    tensor: torch.Tensor | None = field(default=None, repr=False)


@dataclass
class Launch:
    """A launch of a kernel or, without arguments, one that is no Triton kernel: `nbytes` bound its time.

    `other` is the same launch for other tokens.
    """

    kernel: str
    grid: list[int] = field(default_factory=lambda: [1, 1, 1])
    arguments: list[Argument] = field(default_factory=list)
    constants: dict[str, object] = field(default_factory=dict)
    fused: bool = True
    target: str = 'sm_90'
    # machine code, and for AMD the assembly, because Triton has no disassembler for it; None if nothing was compiled
    binary: bytes | None = None
    assembly: str = ''
    # processor time that compiling took: none where Triton's cache has the kernel
    seconds: float = 0.0
    num_warps: int = 0
    shared: int = 0
    nbytes: int = 0
    # the number of this launch among the autotuned ones of a call, of which one counts, and its configuration
    choice: int | None = None
    configuration: str = ''
    other: Launch | None = None
    program: Program | None = None

    @property
    def capability(self) -> int:
        return int(self.target[3:])

    def code(self) -> Program:
        if self.program is None:
            self.program = program_of(self.binary)
        return self.program

    def compiled(self) -> Compiled:
        return count_amdgcn(self.assembly) if self.assembly else count_sass(self.code())

    @property
    def scalars(self) -> dict[str, object]:
        return {a.name: a.value for a in self.arguments if not a.kind.startswith('*')}

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def described(self) -> dict:
        about = {'kernel': self.kernel, 'grid': self.grid, 'enable_fp_fusion': self.fused, 'shared': self.shared}
        if self.binary is not None:
            compiled = self.compiled()
            about |= {
                'registers': compiled.registers, 'spills': compiled.spills, 'loops': compiled.hot, 'num_warps': self.num_warps,
                'seconds': round(self.seconds, 2),
            }
        return about


class Driver(AbsentDevice):
    """A Triton driver that compiles for `target` and, instead of running launches, records and checks them."""

    choice: int | None = None
    configuration = ''

    def __init__(self, target: str, depth: str) -> None:
        device = len(DEPTHS) * list(TARGETS).index(target) + DEPTHS.index(depth)
        super().__init__(target, load_binary, tensors='meta', device=device)
        self.depth, self.launches, self.assembly, self.seconds = depth, [], {}, {}

    def launcher_cls(self, source, metadata):
        def launch(x, y, z, stream, binary, packed, launch_metadata, enter_hook, exit_hook, *arguments):
            check_grid((x, y, z))
            check_arguments(source, arguments)
            self.launches.append(self.record(source, metadata, [x, y, z], binary, arguments))
        return launch

    def record(self, source, metadata, grid: list[int], binary: bytes | None, arguments: tuple) -> Launch:
        launch = Launch(source.fn.__name__, grid, target=self.target, fused=metadata.enable_fp_fusion, choice=self.choice)
        launch.configuration = self.configuration
        for (name, kind), x in zip(source.signature.items(), arguments, strict=True):
            if kind == 'constexpr':
                launch.constants[name] = x
            elif isinstance(x, torch.Tensor):
                storage, size = x.untyped_storage()._cdata, x.numel() * x.itemsize
                launch.arguments.append(Argument(name, kind, None, size, storage, x.storage_offset(), x))
            else:
                launch.arguments.append(Argument(name, kind, x))
        launch.num_warps, launch.shared = metadata.num_warps, metadata.shared
        if binary is not None:
            launch.binary, launch.assembly = binary, self.assembly.get(binary, '')
            launch.seconds = self.seconds.get(binary, 0.0)
        return launch


@cache
def make_driver(target: str, depth: str) -> Driver:
    """One driver for all calls, because Triton caches what it compiled with a driver."""
    return Driver(target, depth)


def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple:
    """(module, function, registers, spills, most threads): a launch is given the machine code as its function."""
    return object(), binary, 0, 0, MAX_THREADS


def check_grid(grid: tuple[int, ...]) -> None:
    for axis, size, most in zip('xyz', grid, MAX_GRID, strict=True):
        if not isinstance(size, int) or not 0 < size <= most:
            raise ValueError(f'grid.{axis} = {size} is not between 1 and {most}')


def check_arguments(source, arguments: tuple) -> None:
    """Raise where Triton's launcher would: a pointer that is not a tensor, a wrong type, or an integer out of range."""
    for (name, kind), x in zip(source.signature.items(), arguments, strict=True):
        if kind.startswith('*') and not hasattr(x, 'data_ptr'):
            raise TypeError(f'{name} is a pointer ({kind}), got {type(x).__name__}')
        if kind in RANGES and not (isinstance(x, int) and RANGES[kind][0] <= x < RANGES[kind][1]):
            raise TypeError(f'{name} is {kind}, got {x!r}')
        if kind.startswith('fp') and not isinstance(x, float):
            raise TypeError(f'{name} is {kind}, got {x!r}')


# stages of Triton's own compiler, whose result another program assembles
LAYOUT_STAGES = ('ttir', 'ttgir', 'llir')


def compile_layout(source, target, options: dict, depth: str) -> SimpleNamespace:
    """What compiling begins with: Triton's frontend, and down to the depth `memory` its passes. Returns the metadata."""
    backend, context, stages = make_backend(target), ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options)
    metadata = {'shared': 0, 'target': target, **vars(parsed), **options}
    module = source.make_ir(
        target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context,
    )
    if depth == 'memory':
        backend.add_stages(stages, parsed, source.language)
        for stage in LAYOUT_STAGES:
            module = stages[stage](module, metadata)
    return SimpleNamespace(**metadata)


def check_shared(launch_metadata: SimpleNamespace, target: str) -> None:
    """As Triton does before it loads a kernel."""
    if launch_metadata.shared > DEVICES[target].shared_memory:
        raise OutOfResources(launch_metadata.shared, DEVICES[target].shared_memory, 'shared memory')


def processor_seconds() -> float:
    """Of this process and the assemblers that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compile_for_driver(source, target, options, **others):
    """Compile to the active driver's depth. A kernel keeps the function that it compiled with first, so there is one."""
    active = driver._active
    if not isinstance(active, Driver):
        return triton_compile(source, target=target, options=options, **others)
    if active.depth == 'code':
        started = processor_seconds()
        compiled = triton_compile(source, target=target, options=options, **others)
        active.assembly[compiled.kernel] = compiled.asm.get('amdgcn', '')
        active.seconds[compiled.kernel] = processor_seconds() - started
        return compiled
    metadata = SimpleNamespace(shared=0, **options)
    if active.depth != 'launch':
        metadata = compile_layout(source, target, options, active.depth)
        check_shared(metadata, active.target)
    launcher = active.launcher_cls(source, metadata)
    return SimpleNamespace(run=launcher, function=None, packed_metadata=None, launch_metadata=lambda *_: None)


# takes an autotuned kernel's name, key and configurations, and returns those to launch
Choose = Callable[[str, list[Config]], list[Config]]


def spread(count: int) -> Choose:
    """Select `count` of the configurations, from the first to the last."""
    def choose(tuned_for: str, configs: list[Config]) -> list[Config]:
        return configs[::max((len(configs) - 1) // max(count - 1, 1), 1)][:count]
    return choose


def launch_candidates(active: Driver, choose: Choose):
    """Launch the selected configurations, instead of an autotuner's choice, which needs a GPU."""
    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        given = {**self.nargs, **kwargs}
        dtypes = sorted({str(x.dtype) for x in given.values() if isinstance(x, torch.Tensor)})
        key = [f'{name}={given[name]}' for name in self.keys if name in given]
        tuned_for = ' '.join([self.base_fn.__name__, active.target, *key, *dtypes])
        result, configs = None, choose(tuned_for, self.prune_configs(kwargs))
        if configs[0].pre_hook is not None:
            # the hook's launches count once, whichever configuration is chosen
            configs[0].pre_hook({**given, **configs[0].all_kwargs()})
        active.choice = 0
        for config in configs:
            active.configuration = str(config)
            try:
                result = self.fn.run(*args, **kwargs, **config.all_kwargs())
            except OutOfResources:
                continue
            # wrappers look it up
            self.best_config = config
            active.choice += 1
        if not active.choice:
            raise RuntimeError(f'no configuration of {self.base_fn.__name__} fits {active.target}')
        active.choice, active.configuration = None, ''
        return result

    return mock.patch.object(Autotuner, 'run', run)


@contextmanager
def rehearsal(target: str, depth: str, choose: Choose | None = None):
    """Make Triton launch on a `Driver` and yield its launches; autotuned kernels run with some of their configurations."""
    before, active = driver._active, make_driver(target, depth)
    active.launches.clear()
    driver.set_active(active)
    try:
        with mock.patch.object(triton.compiler, 'compile', compile_for_driver), launch_candidates(active, choose or spread(1)):
            yield active.launches
    finally:
        driver._active = before
