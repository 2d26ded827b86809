"""The launches of a call, taken from the wrappers that make them: code, arguments, grid.

The call runs on meta tensors with the driver of :mod:`offgpu.launches`, which compiles each kernel for what it
is really given, as on the GPU. It runs again for twice or half the tokens, without compiling: what of a launch changes with
the length tells how its work grows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.autotuner import Autotuner

from offgpu.launches import Driver, rehearsal
from offgpu.predict.sass import Program, read_cubin

# of a number of tokens: makes what the pass takes, and returns the pass
Pass = Callable[[int], Callable[[], object]]
# of autotuned kernels, whose choice only a GPU can make: as many configurations are compiled, and the best counts
CANDIDATES = 2
OTHER_DEVICES = 100


@dataclass
class Argument:
    """An argument in the order of the kernel's: its Triton type, its value (a tensor's is None), a tensor's bytes."""

    name: str
    kind: str
    value: object = None
    nbytes: int = 0
    storage: int = 0


@dataclass
class Launch:
    """A kernel's launch; a PyTorch operation has no code. `other` is the same launch for another number of tokens."""

    kernel: str
    grid: list[int] = field(default_factory=lambda: [1, 1, 1])
    arguments: list[Argument] = field(default_factory=list)
    cubin: bytes | None = None
    num_warps: int = 0
    shared: int = 0
    capability: int = 90
    nbytes: int = 0
    # the number of this launch among autotuned ones of the same call, of which one counts
    choice: int | None = None
    other: Launch | None = None
    program: Program | None = None

    def code(self) -> Program:
        if self.program is None:
            self.program = read_cubin(self.cubin)
        return self.program

    @property
    def scalars(self) -> dict[str, object]:
        return {a.name: a.value for a in self.arguments if not a.kind.startswith('*')}

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


class CaptureDriver(Driver):
    """Keeps each launch with its code and arguments."""

    choice: int | None = None
    # so that a storage's address is not given to another tensor before the call ends
    alive: list

    def __init__(self, target: str, depth: str) -> None:
        super().__init__(target, depth)
        # kernels are cached by device: not those of the other driver
        self.device += OTHER_DEVICES
        self.alive = []
        self.utils.load_binary = lambda name, binary, shared, device: (object(), binary, 0, 0, 1024)

    def record(self, source, metadata, grid: list[int], function: bytes | None, arguments: tuple) -> Launch:
        kept = []
        for (name, kind), x in zip(source.signature.items(), arguments, strict=True):
            if kind == 'constexpr':
                continue
            if isinstance(x, torch.Tensor):
                self.alive.append(x)
                kept.append(Argument(name, kind, None, x.numel() * x.itemsize, x.untyped_storage()._cdata))
            else:
                kept.append(Argument(name, kind, x))
        capability = int(self.target[3:])
        launch = Launch(source.fn.__name__, list(grid), kept, function, capability=capability, choice=self.choice)
        if function is not None:
            launch.num_warps, launch.shared = metadata.num_warps, metadata.shared
        return launch


@cache
def make_driver(target: str, depth: str) -> CaptureDriver:
    return CaptureDriver(target, depth)


class Copies(TorchDispatchMode):
    """Keeps PyTorch's own operations that move data: copies to contiguous memory, sums, conversions."""

    MOVING = ('clone', '_to_copy', 'sum', 'mul', 'add', 'add_', 'cumsum', 'exp')
    # their result alone, not what it is shaped like or what was there before
    FILLING = ('zero_', 'fill_', 'zeros', 'zeros_like')

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        moved = (out,) if name in self.FILLING else args if name == 'copy_' else (*args, out) if name in self.MOVING else ()
        if moved:
            tensors = [x for x in moved if isinstance(x, torch.Tensor)]
            self.launches.append(Launch(f'torch.{name}', nbytes=sum(x.numel() * x.itemsize for x in tensors)))
        return out


@contextmanager
def candidates(driver: CaptureDriver):
    """Have autotuned kernels launch with the first and the last of their configurations, one after the other."""
    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs)
        step = max((len(configs) - 1) // max(CANDIDATES - 1, 1), 1)
        for driver.choice, config in enumerate(configs[::step][:CANDIDATES]):
            result = self.fn.run(*args, **kwargs, **config.all_kwargs())
        driver.choice = None
        return result

    with mock.patch.object(Autotuner, 'run', run):
        yield


def take(call: Pass, T: int, target: str, depth: str) -> list[Launch]:
    """The launches of the pass that `call(T)` returns; those that make what it takes are not compiled, and not kept."""
    first, driver = make_driver(target, 'launch'), make_driver(target, depth)
    with rehearsal(target, 'launch', make_driver), candidates(first):
        run = call(T)
    first.alive.clear()
    with rehearsal(target, depth, make_driver) as launches, candidates(driver), Copies(launches):
        run()
        taken = list(launches)
    driver.alive.clear()
    return taken


def capture(call: Pass, T: int, target: str, depth: str = 'code') -> list[Launch]:
    """The launches of a pass over T tokens, each with that over `2 * T` or `T // 2` tokens.

    The second where twice the tokens take other kernels, as wrappers cut sequences in time from some length on.

    Raises:
        RuntimeError: neither launches the same kernels, so that nothing can be said of how they grow.
    """
    launches = take(call, T, target, depth)
    names = [x.kernel for x in launches]
    for length in (2 * T, T // 2):
        others = take(call, length, target, 'launch') if length else []
        if [x.kernel for x in others] == names:
            for x, y in zip(launches, others, strict=True):
                x.other = y
            return launches
    raise RuntimeError(f'other kernels for {T} tokens than for twice or half as many: {names}')
