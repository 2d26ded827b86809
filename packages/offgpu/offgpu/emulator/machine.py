"""Executes a decoded kernel: all lanes of a batch of thread blocks as NumPy arrays, one block of code at a time.

Every register is an array `[lanes]` of bits. Lanes at the same instruction run together under a mask; those furthest behind
run first, so that diverged lanes reconverge. `order` schedules a thread block's warps: all `together`, or one warp at a time
up to its next barrier, `first` or `last` warp first. Without a race all three give the same bits.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from offgpu.emulator.formats import UNSIGNED
from offgpu.emulator.memory import IN_VIEW, KINDS, Findings, Space, Threads
from offgpu.emulator.parse import Immediate, Instruction, Unsupported
from offgpu.emulator.program import Block, Program, Registers

ORDERS = ('together', 'first', 'last')
# lanes of a batch; a larger grid runs in several batches
MAX_LANES = 4096
# initial value of registers
POISON = 0x7fc0_dead_7fc0_dead


class Machine:
    """Runs a program over a grid. `globals_` is global memory, `parameters` the kernel's parameters as bits in integers."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], shared_bytes: int, globals_: Space, parameters: dict[str, int],
        findings: Findings, order: str = 'together', races: bool = True, counts: Counter | None = None,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f'order must be one of {ORDERS}, got {order!r}')
        self.program, self.grid, self.shared_bytes, self.globals = program, grid, shared_bytes, globals_
        self.parameters, self.findings, self.order, self.races = parameters, findings, order, races
        self.counts = Counter() if counts is None else counts

    def run(self) -> None:
        total, threads = math.prod(self.grid), self.program.kernel.threads
        batch = max(MAX_LANES // threads, 1)
        with np.errstate(all='ignore'):
            for first in range(0, total, batch):
                self.run_batch(first, min(batch, total - first))

    # ---- one batch

    def run_batch(self, first: int, blocks: int) -> None:
        threads = self.program.kernel.threads
        n = blocks * threads
        self.n, self.lanes_of_block = n, threads
        self.all_lanes = np.arange(n)
        self.mask = None
        self.threads = Threads(threads, first * threads, np.zeros(blocks, np.int32), *np.zeros((2, n // 32), np.int32))
        self.shared = make_shared(self.shared_bytes, blocks, self.program.granules['shared'], self.races)
        self.local = np.zeros((n, max(self.program.kernel.local_bytes, 1)), np.uint8)
        # cp.async: groups that each lane committed, and copies in flight
        self.groups = np.zeros(n, np.int64)
        self.copies: list[dict[str, Any]] = []
        # wgmma: operands read from shared memory by products that are still in flight
        self.products: list[dict[str, Any]] = []
        registers = Registers(
            np.zeros(n, np.bool_) if bits == 1 else np.full(n, POISON & ((1 << bits) - 1), UNSIGNED[bits])
            for bits in self.program.bits
        )
        block = first + self.all_lanes // threads
        tid = self.all_lanes % threads
        x, y, _ = self.grid
        values = {
            '%tid.x': tid, '%tid.y': 0 * tid, '%tid.z': 0 * tid, '%ntid.x': 0 * tid + threads, '%ntid.y': 0 * tid + 1,
            '%ntid.z': 0 * tid + 1, '%ctaid.x': block % x, '%ctaid.y': block // x % y, '%ctaid.z': block // (x * y),
            '%laneid': tid % 32, '%warpid': tid // 32,
            **{f'%nctaid.{axis}': 0 * tid + size for axis, size in zip('xyz', self.grid, strict=True)},
        }
        registers.special = {name: value.astype(np.uint32) for name, value in values.items()}
        self.registers = registers
        # warps of a warp group are scheduled together
        self.schedule(tid // (128 if self.program.uses_groups else 32))
        if any(len(copy['lanes']) for copy in self.copies):
            self.report('cp.async never waited for', self.copies[0]['instruction'], 'at the end of the program')

    def schedule(self, turn: np.ndarray) -> None:
        program, n = self.program, self.n
        place, waiting = np.zeros(n, np.int64), np.zeros(n, np.bool_)
        while True:
            ready = (place < program.exit) & ~waiting
            if not ready.any():
                if not waiting.any():
                    return
                # all remaining lanes wait
                self.release(place, waiting)
                continue
            if self.order != 'together':
                ready &= turn == (turn[ready].min() if self.order == 'first' else turn[ready].max())
            at = int(place[ready].min())
            active = ready & (place == at)
            block = program.blocks[at]
            self.mask = None if active.all() else active
            self.counts['instructions'] += len(block.operations) + 1
            self.run_block(block)
            self.finish(block, active, place, waiting)

    def run_block(self, block: Block) -> None:
        registers, outer = self.registers, self.mask
        for operation, guard, negated in block.operations:
            if guard is None:
                operation(self)
                continue
            mask = ~registers[guard] if negated else registers[guard]
            if outer is not None:
                mask = mask & outer
            if mask.all():
                operation(self)
            elif mask.any():
                self.mask = mask
                operation(self)
                self.mask = outer

    def finish(self, block: Block, active: np.ndarray, place: np.ndarray, waiting: np.ndarray) -> None:
        """Advance the lanes that ran a block of code."""
        end = block.end
        if end is None:
            place[active] = block.next
            return
        if end.guard is not None:
            p = self.registers[self.program.register(end.guard)]
            chosen = active & (~p if end.negated else p)
        else:
            chosen = active
        place[active] = block.next
        if end.opcode[0] == 'bra':
            place[chosen] = self.program.targets[end.operands[0]]
        elif end.opcode[0] in ('ret', 'exit'):
            place[chosen] = self.program.exit
        elif end.opcode[0] == 'trap':
            if chosen.any():
                self.report('trap', end, f'thread {self.threads.first + int(np.flatnonzero(chosen)[0])}')
            place[chosen] = self.program.exit
        else:
            if len(end.operands) > 1 or not isinstance(end.operands[0], Immediate):
                raise Unsupported(end.text)
            self.whole_warps(end, chosen)
            waiting |= chosen

    def release(self, place: np.ndarray, waiting: np.ndarray) -> None:
        """Release all waiting lanes: every lane waits or has ended."""
        size, by_block = self.lanes_of_block, waiting.reshape(-1, self.lanes_of_block)
        passing = by_block.any(1)
        for block in np.flatnonzero(passing):
            at = place[block * size:(block + 1) * size]
            if len(set(at.tolist())) > 1:
                self.findings.add(
                    'not all at one barrier', self.program.kernel.name, 'bar.sync', '',
                    f'block {block}: lanes at {sorted(set(at.tolist()))}, {self.program.exit} is the end',
                )
        self.threads.epochs += passing.astype(np.int32)
        self.threads.syncs += np.repeat(passing, size // 32).astype(np.int32)
        waiting[:] = False

    # ---- used by operations

    def put(self, number: int, value) -> None:
        """Give a register a value where lanes are active."""
        old = self.registers[number]
        if value.dtype != old.dtype:
            value = value.view(old.dtype) if value.dtype.itemsize == old.dtype.itemsize else value.astype(old.dtype)
        if self.mask is not None:
            value = np.where(self.mask, value, old)
        elif np.ndim(value) == 0:
            value = np.full(self.n, value, old.dtype)
        self.registers[number] = value

    def put_lanes(self, number: int, lanes: np.ndarray, value: np.ndarray) -> None:
        """Give a register the values `[lanes]`, cut or widened to its width."""
        old = self.registers[number].dtype
        value = value.view(old) if value.dtype.itemsize == old.itemsize else value.astype(old)
        if lanes is self.all_lanes:
            self.registers[number] = np.ascontiguousarray(value)
        else:
            self.registers[number] = new = self.registers[number].copy()
            new[lanes] = value

    def spread(self, value) -> np.ndarray:
        """A value as an array of all lanes; it may be a scalar."""
        return np.broadcast_to(value, self.n)

    def by_warp(self, value) -> np.ndarray:
        return self.spread(value).reshape(-1, 32)

    def lanes(self) -> np.ndarray:
        return self.all_lanes if self.mask is None else np.flatnonzero(self.mask)

    def whole_warps(self, instruction: Instruction, mask: np.ndarray | None = None) -> None:
        """Check that all lanes of a warp take part in an instruction across lanes."""
        mask = self.mask if mask is None else mask
        if mask is None:
            return
        by_warp = mask.reshape(-1, 32)
        if (by_warp.any(1) != by_warp.all(1)).any():
            self.report('diverged warp', instruction, 'some lanes of a warp miss an instruction that all must run')

    def report(self, kind: str, instruction: Instruction, example: str, count: int = 1) -> None:
        self.findings.add(kind, self.program.kernel.name, instruction.text, instruction.line, example, count)

    def memory(
        self, space: str, write: bool, address, lanes: np.ndarray, data: np.ndarray, instruction: Instruction,
        asynchronous: bool = False,
    ) -> None:
        """Load into or store from `data`, bytes `[lanes, width]`."""
        if len(lanes) == 0:
            return
        self.counts[f'{space} {"stores" if write else "loads"}'] += 1
        target = self.globals if space == 'global' else self.shared
        address = np.broadcast_to(address, len(lanes)).astype(np.int64)
        self.threads.clock += 1
        found, count = target.access(write, address, lanes, data, self.threads, asynchronous)
        size = self.lanes_of_block
        for i, (kind, thread, a, other) in enumerate(found):
            where = f'block {thread // size} thread {thread % size} at {a:#x}'
            where += f' after block {other // size} thread {other % size}' if other >= 0 else ''
            # errors beyond those listed count as of the last one's kind
            self.report(KINDS[kind], instruction, where, 1 if i < len(found) - 1 else count - i)


def make_shared(size: int, blocks: int, granule: int, races: bool) -> Space:
    padded = -(-max(size, 1) // 16) * 16
    bits = np.full(padded * blocks // granule, IN_VIEW, np.uint8)
    # poison, to expose reads of unwritten memory
    memory = np.full(padded * blocks, 0xff, np.uint8)
    return Space(memory, bits, granule, [0], [padded], True, races)
