"""Issue the traces of an SM's warps, in order, on four sub-partitions that share L1, L2 port and DRAM bandwidth.

The model itself is `core.c`, which gcc compiles at its first use.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path as FilePath

import numpy as np

from offgpu.predict.machine import Machine
from offgpu.predict.pipes import KINDS, PIPES, Static, prepare
from offgpu.predict.warp import Trace
from offgpu.sass import Program


@dataclass
class Path:
    """A warp: a trace, and by how many sectors what its instructions touch lies elsewhere than the trace's."""

    trace: Trace
    shift: dict[int, int] = field(default_factory=dict)


@dataclass
class Result:
    """What the SM did. Idle cycles of a scheduler count for what its next instruction waited for."""

    cycles: float
    issued: int
    idle: Counter
    bytes: Counter

    def share(self) -> dict[str, float]:
        total = self.cycles * 4
        return {'issue': self.issued / total} | {k: v / total for k, v in self.idle.most_common()}


class CStatic(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in (
        'pipe', 'occupancy', 'latency', 'kind', 'stall', 'wait', 'write_barrier', 'read_barrier', 'depbar', 'depbar_left',
        'flags', 'sources',
    )] + [(n, ctypes.c_int32 * 6) for n in ('slot', 'reg', 'keep')]


ACCESS = np.dtype([(n, np.int32) for n in ('space', 'store', 'passes', 'tensor', 'count', 'shift')] + [
    (n, np.int64) for n in ('pattern', 'first')
])
MACHINE_FIELDS = (
    'dram_per_clock', 'l2_per_clock', 'bank_window', 'l1_hit', 'l2_hit', 'dram', 'shared_load', 'ldsm',
    'store_read', 'barrier', 'branch', 'mio_queue', 'mio_occupancy', 'block_launch', 'l1_lines', 'l2_room',
    'l0_lines', 'l0_miss',
)


class CMachine(ctypes.Structure):
    _fields_ = [(n, ctypes.c_double) for n in MACHINE_FIELDS]


SOURCES = ('L1', 'L2', 'L2 in flight', 'DRAM', 'DRAM in flight')
REASONS = (
    'start', 'stall count', 'branch', 'barrier', *(f'pipe {p}' for p in PIPES), 'register ports', 'wait cp.async',
    'wait wgmma', 'wait LDS', 'wait local', 'wait store', 'wait operands read', 'no warp left', 'fetch',
    *(f'wait {k}' for k in KINDS),
    *('',) * (16 - len(KINDS)),
)
SPACES = {'global': 0, 'shared': 1, 'local': 2}
LEVELS = {'l2': 1, 'dram': 3}
# part of L2 that what is touched again may count on while others stream through: each half serves its own SMs
L2_PART = 0.5


@cache
def library() -> ctypes.CDLL:
    """core.c, compiled once for its contents."""
    source = FilePath(__file__).with_name('core.c')
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = FilePath(tempfile.gettempdir()) / f'predict-{os.getuid()}-{name}.so'
    if not target.exists():
        made = target.with_suffix(f'.{os.getpid()}')
        try:
            subprocess.run(['gcc', '-O2', '-shared', '-fPIC', '-o', str(made), str(source)], check=True)
        except FileNotFoundError as error:
            raise RuntimeError('offgpu.predict compiles its core with gcc, which is not on the PATH') from error
        made.rename(target)
    lib = ctypes.CDLL(str(target))
    lib.simulate.restype = ctypes.c_double
    return lib


def statics_of(program: Program, machine: Machine) -> ctypes.Array:
    """The program's instructions as core.c takes them."""
    statics: list[Static] = prepare(program, machine)
    out = (CStatic * len(statics))()
    for c, x in zip(out, statics, strict=True):
        c.pipe, c.kind = PIPES.index(x.pipe), KINDS.index(x.kind if x.kind in KINDS else 'other')
        c.occupancy, c.latency, c.stall, c.wait, c.flags = x.occupancy, x.latency, x.stall, x.wait, x.flags
        c.write_barrier, c.read_barrier = (-1 if b is None else b for b in (x.write_barrier, x.read_barrier))
        c.depbar, c.depbar_left = x.depbar or (-1, 0)
        c.sources = min(len(x.sources), 6)
        for i, (slot, register, keep) in enumerate(x.sources[:6]):
            c.slot[i], c.reg[i], c.keep[i] = min(slot, 7), register, keep
    return out


class Memory:
    """The accesses of all traces as arrays, and the tensors that they name."""

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        self.instructions: dict[int, int] = {}
        self.rows: list[tuple] = []
        self.patterns: list[np.ndarray] = []
        self.starts: dict[int, int] = {}
        self.size = 0

    def add(self, trace: Trace) -> np.ndarray:
        """The trace's steps: pairs of an instruction and an access, or -1."""
        steps = np.full((len(trace.steps), 2), -1, np.int32)
        steps[:, 0] = trace.steps
        for i, a in enumerate(trace.accesses):
            if a is None:
                continue
            steps[i, 1] = len(self.rows)
            start = 0
            if a.pattern is not None:
                start = self.starts.setdefault(id(a.pattern), self.size)
                if start == self.size:
                    self.patterns.append(a.pattern)
                    self.size += len(a.pattern)
            tensor = self.tensors.setdefault(a.tensor, len(self.tensors))
            shift = self.instructions.setdefault(trace.steps[i], len(self.instructions))
            self.rows.append((SPACES[a.space], a.store, a.passes, tensor, a.count, shift, start, a.first))
        return steps


def pointer(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def simulate(
    program: Program, machine: Machine, blocks: list[list[Path]], levels: dict[str, str], resident: int,
    shares: dict[str, float] | None = None,
) -> Result:
    """Run `blocks` (their warps' paths) on one SM that holds `resident` of them.

    `levels` says where a tensor's sectors come from when the SM first touches them: l2 or dram ('*': all others), and `shares`
    which part of its bytes DRAM moves where that is not all: the rest other SMs share, or it stays in L2.
    """
    statics, memory, arrays = statics_of(program, machine), Memory(), {}
    paths = [p for block in blocks for p in block]
    for path in paths:
        if id(path.trace) not in arrays:
            arrays[id(path.trace)] = memory.add(path.trace)
    tensors = memory.tensors or {'': 0}
    accesses = np.array(memory.rows or [(0,) * 8], ACCESS)
    patterns = np.concatenate([*memory.patterns, np.zeros(1, np.int64)])
    c_levels = np.array([LEVELS[levels.get(t, levels.get('*', 'dram'))] for t in tensors], np.int32)
    c_shares = np.array([(shares or {}).get(t, 1.0) for t in tensors], np.float64)
    warps = np.cumsum([0, *(len(block) for block in blocks)]).astype(np.int32)
    deltas = np.array([[p.shift.get(x, 0) for x in memory.instructions or [0]] for p in paths], np.int64)
    lengths = np.array([len(p.trace.steps) for p in paths], np.int32)
    steps = (ctypes.c_void_p * len(paths))(*(arrays[id(p.trace)].ctypes.data for p in paths))
    values = {f: float(getattr(machine, f, 0)) for f in MACHINE_FIELDS} | dict(
        dram_per_clock=machine.dram_bandwidth / machine.multiprocessors / machine.clock,
        l2_per_clock=machine.l2_bytes_per_clock, l2_room=machine.l2_size * L2_PART / machine.multiprocessors,
        mio_occupancy=machine.occupancy['mio'],
    )
    count = len(tensors)
    idle, moved, issued = np.zeros(len(REASONS) + 5 * count), np.zeros(4 * count), ctypes.c_int64()
    cycles = library().simulate(
        statics, pointer(accesses), pointer(patterns), pointer(c_levels), pointer(c_shares), ctypes.c_int(deltas.shape[1]),
        ctypes.byref(CMachine(**values)), ctypes.c_int(len(blocks)), pointer(warps), steps, pointer(lengths), pointer(deltas),
        ctypes.c_int(resident), pointer(idle), pointer(moved), ctypes.byref(issued),
    )
    names = [*REASONS, *(f'wait LDG {t} {s}' for t in tensors for s in SOURCES)]
    kinds = ('L2 read', 'DRAM read', 'L2 write', 'DRAM write')
    traffic = Counter({
        f'{kind} {t}': float(moved[4 * i + j]) for t, i in tensors.items() for j, kind in enumerate(kinds) if moved[4 * i + j]
    })
    waits = Counter({n: float(v) for n, v in zip(names, idle, strict=True) if v > 0})
    return Result(cycles, issued.value, waits, traffic)
