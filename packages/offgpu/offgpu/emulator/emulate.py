"""Executes launches on CPU tensors: copies their storages to emulated global memory, and back."""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from offgpu.emulator.launch import Launch, emulated
from offgpu.emulator.machine import Machine
from offgpu.emulator.memory import IN_VIEW, SEGMENT_BITS, WRITTEN, Findings, Space
from offgpu.emulator.parse import parse
from offgpu.emulator.program import Program

# bytes between storages in the array that holds all; accesses there are errors
GAP = 256


@dataclass
class Fresh:
    """A storage from `torch.empty`, with the bytes that kernels have written since."""

    tensor: torch.Tensor
    version: int
    written: np.ndarray


@dataclass
class Ran:
    """A launch that was executed."""

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    shared: int
    seconds: float
    counts: dict


@dataclass
class Emulator:
    """Handler of launches. `findings` collects what is wrong, `launches` what ran."""

    target: str = 'sm_90'
    order: str = 'together'
    races: bool = True
    # whether ptxas also makes machine code, which is not run
    assemble: bool = False
    findings: Findings = field(default_factory=Findings)
    launches: list[Ran] = field(default_factory=list)
    # kernels that were not in Triton's cache, and the CPU seconds to compile them
    compiled: list[tuple[str, float]] = field(default_factory=list)
    fresh: dict[int, Fresh] = field(default_factory=dict)

    @contextmanager
    def active(self):
        """Execute launches of Triton kernels here; memory of `torch.empty` and similar functions counts as unwritten."""
        names = [(torch, 'empty'), (torch, 'empty_like'), (torch, 'empty_strided'), (torch.Tensor, 'new_empty')]
        before = [getattr(owner, name) for owner, name in names]

        def noting(function):
            def make(*args, **kwargs):
                x = function(*args, **kwargs)
                if x.device.type == 'cpu' and x.numel() and x.layout is torch.strided:
                    self.note(x)
                return x
            return make

        for (owner, name), function in zip(names, before, strict=True):
            setattr(owner, name, noting(function))
        try:
            with emulated(self.target, self.launch, self.note_compiled, assemble=self.assemble):
                yield self
        finally:
            for (owner, name), function in zip(names, before, strict=True):
                setattr(owner, name, function)
            self.fresh.clear()

    def note(self, x: torch.Tensor) -> None:
        data = bytes_of(x)
        # a NaN in every float format
        data.fill(0xff)
        self.fresh[x.untyped_storage().data_ptr()] = Fresh(x, x._version, np.zeros(len(data), np.bool_))

    def note_compiled(self, kernel: str, seconds: float) -> None:
        self.compiled.append((kernel, round(seconds, 1)))

    def launch(self, launch: Launch) -> None:
        """Execute a launch: copy its storages in, run the grid, copy them back."""
        started = time.perf_counter()
        program = program_of(launch.ptx)
        kernel = program.kernel
        if kernel.threads != 32 * launch.num_warps:
            raise ValueError(f'{kernel.name} has {kernel.threads} threads, launched with {launch.num_warps} warps')
        for use in program.early_uses:
            self.findings.add('a register of wgmma is used before the wait', kernel.name, use.text, use.line, '')
        storages = Storages([x for _, kind, x in launch.arguments if kind.startswith('*')])
        memory, bits = storages.gather(self.written)
        granule = program.granules['global']
        if granule > 1:
            # a granule counts as what all its bytes are
            bits = np.bitwise_and.reduce(bits.reshape(-1, granule), 1)
        space = Space(memory, bits, granule, storages.start, storages.size, shared=False, races=self.races)
        parameters = {}
        arguments = iter(launch.arguments)
        for name, width in kernel.parameters:
            # the last parameters are Triton's scratch buffers, which these kernels do not use
            _, kind, x = next(arguments, (None, 'i64', 0))
            parameters[name] = storages.address(x) if isinstance(x, torch.Tensor) else argument_bits(kind, x, width)
        counts: Counter[str] = Counter()
        Machine(
            program, launch.grid, launch.shared, space, parameters, self.findings, self.order, self.races, counts,
        ).run()
        written = np.repeat(space.bits & WRITTEN != 0, granule)
        for pointer, place in storages.scatter(memory):
            if pointer in self.fresh:
                self.fresh[pointer].written |= written[place]
        self.launches.append(Ran(
            launch.name, launch.grid, launch.num_warps, launch.shared, round(time.perf_counter() - started, 2), dict(counts),
        ))

    def written(self, pointer: int) -> np.ndarray | np.bool_:
        """Mask of a storage's written bytes."""
        fresh = self.fresh.get(pointer)
        if fresh is None or fresh.tensor._version != fresh.version:
            return np.True_
        return fresh.written


class Storages:
    """The storages of a launch's tensors, concatenated in one array of bytes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.data = {x.untyped_storage().data_ptr(): bytes_of(x) for x in tensors}
        self.start: list[int] = []
        self.size = [len(x) for x in self.data.values()]
        self.number = {pointer: i for i, pointer in enumerate(self.data)}
        self.end = 0
        for pointer, data in self.data.items():
            if pointer % 16:
                raise ValueError(f'a storage at {pointer:#x}, which is not aligned as on a GPU')
            self.start.append(self.end)
            self.end += -(-len(data) // GAP) * GAP + GAP

    def place(self, pointer: int) -> slice:
        i = self.number[pointer]
        return slice(self.start[i], self.start[i] + self.size[i])

    def gather(self, written: Callable[[int], np.ndarray | np.bool_]) -> tuple[np.ndarray, np.ndarray]:
        """All bytes, and the bits of the shadow for each: written, an element of a tensor."""
        memory, bits = np.full(self.end, 0xff, np.uint8), np.zeros(self.end, np.uint8)
        for pointer, data in self.data.items():
            memory[self.place(pointer)] = data
            bits[self.place(pointer)] = np.where(written(pointer), WRITTEN, 0)
        for x in self.tensors:
            bits[self.place(x.untyped_storage().data_ptr())] |= IN_VIEW * elements_of(x)
        return memory, bits

    def scatter(self, memory: np.ndarray) -> Iterator[tuple[int, slice]]:
        """Copy each storage's bytes back; yields its pointer and its place."""
        for pointer, data in self.data.items():
            data[:] = memory[self.place(pointer)]
            yield pointer, self.place(pointer)

    def address(self, x: torch.Tensor) -> int:
        """Of the first element, in a range of its own for each storage."""
        return ((self.number[x.untyped_storage().data_ptr()] + 1) << SEGMENT_BITS) + int(x.storage_offset()) * x.element_size()


PROGRAMS: dict[str, Program] = {}


def program_of(ptx: str) -> Program:
    key = hashlib.sha256(ptx.encode()).hexdigest()
    if key not in PROGRAMS:
        PROGRAMS[key] = Program(parse(ptx))
    return PROGRAMS[key]


def bytes_of(x: torch.Tensor) -> np.ndarray:
    """All bytes of the storage, shared."""
    if not x.untyped_storage().nbytes():
        return np.zeros(0, np.uint8)
    return torch.tensor([], dtype=torch.uint8).set_(x.untyped_storage()).numpy()


def elements_of(x: torch.Tensor) -> np.ndarray:
    """Which bytes of the storage are elements of `x`."""
    size = x.element_size()
    mark = torch.zeros(x.untyped_storage().nbytes() // size, dtype=torch.uint8)
    if x.numel():
        shape = [1 if stride == 0 else n for n, stride in zip(x.shape, x.stride(), strict=True)]
        mark.as_strided(shape, x.stride(), x.storage_offset()).fill_(1)
    return np.repeat(mark.numpy(), size)


def argument_bits(kind: str, x, width: int) -> int:
    if kind in ('fp32', 'f32'):
        return struct.unpack('<I', struct.pack('<f', x))[0]
    if kind in ('fp64', 'f64'):
        return struct.unpack('<Q', struct.pack('<d', x))[0]
    return int(x) & ((1 << 8 * width) - 1)
