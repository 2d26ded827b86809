"""What issuing each instruction takes: its pipe, how long it keeps it, its latency, the registers it reads."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offgpu.predict.machine import Machine
from offgpu.sass import Instruction, Program

FMA = {'FFMA', 'FMUL', 'FADD', 'HFMA2', 'HADD2', 'HMUL2', 'FSWZADD'}
CONVERT = {'I2F', 'F2I', 'F2F', 'POPC', 'FLO', 'FRND'}
MIO = {
    'LDG', 'STG', 'LDS', 'STS', 'LDSM', 'STSM', 'LDGSTS', 'LDL', 'STL', 'SHFL', 'RED', 'ATOMG', 'ATOMS', 'LD', 'ST', 'MOVM',
}
CONTROL = {
    'BRA', 'EXIT', 'BSSY', 'BSYNC', 'CALL', 'RET', 'WARPSYNC', 'BAR', 'DEPBAR', 'NOP', 'LDGDEPBAR', 'WARPGROUP', 'MEMBAR',
    'FENCE', 'ERRBAR', 'CCTL', 'YIELD', 'BMOV',
}
# the orders are those of core.c
PIPES = ('fma', 'fmaheavy', 'alu', 'xu', 'convert', 'uniform', 'branch', 'tensor', 'wgmma', 'mio', 'misc', 'fp64')
KINDS = ('fixed', 'MUFU', 'convert', 'SHFL', 'S2R', 'LDC', 'uniform', 'MOVM', 'other')
FLAGS = {'SHFL': 1, 'LDSM': 2, 'LDGSTS': 4, 'LDGDEPBAR': 8, 'BAR': 16}
# the queue of wgmma among those that a DEPBAR waits for
WGMMA_QUEUE = 6


@dataclass(slots=True)
class Static:
    """What issuing an instruction needs, worked out once."""

    pipe: str
    occupancy: int
    latency: int
    kind: str
    stall: int
    wait: int
    write_barrier: int | None
    read_barrier: int | None
    # (slot, register, marked for reuse)
    sources: tuple[tuple[int, int, bool], ...]
    depbar: tuple[int, int] | None
    flags: int


def source_registers(x: Instruction) -> tuple[tuple[int, int, bool], ...]:
    """Register operands read, with their slots; the first operand of most is written."""
    if x.base in CONTROL or x.base in MIO or x.base in ('HGMMA', 'S2R', 'MUFU'):
        return ()
    out, slot = [], 0
    for i, arg in enumerate(x.args):
        if re.fullmatch(r'!?U?P[T\d]', arg) or i == 0 and x.base != 'R2UR':
            continue
        if m := re.match(r'[-~|]*R(\d+)', arg):
            out.append((slot, int(m[1]), '.reuse' in arg))
            if x.base == 'IMAD' and 'WIDE' in x.parts and slot == 2 or arg.endswith('.64'):
                out.append((slot, int(m[1]) + 1, '.reuse' in arg))
        slot += 1
    return tuple(out)


def pipe_of(x: Instruction, machine: Machine) -> tuple[str, int | None, int, str]:
    """(pipe, cycles that it is kept where not the pipe's own, latency, what a wait for it is called)."""
    base = x.base
    if base in FMA:
        return 'fma', None, 0, 'fixed'
    if base == 'IMAD':
        return 'fmaheavy', machine.occupancy['fmaheavy'] * (2 if x.parts & {'WIDE', 'HI'} else 1), 0, 'fixed'
    if base in ('HMMA', 'IMMA', 'DMMA'):
        shape = next((s for s in x.op.split('.') if s in machine.hmma), '16816')
        return 'tensor', machine.hmma[shape] * (2 if 'TF32' in x.parts else 1), 0, 'fixed'
    if base == 'HGMMA':
        m = re.search(r'64x(\d+)x(\d+)', x.op)
        # four warps share one product of 64 rows, a quarter on each sub-partition's tensor core
        work = 64 * int(m[1]) * int(m[2]) * (2 if 'TF32' in x.parts else 1) // machine.wgmma_rate
        occupancy = max(work, machine.wgmma_min)
        return 'wgmma', occupancy, occupancy + machine.wgmma_latency, 'other'
    if base == 'MUFU':
        return 'xu', None, machine.mufu, 'MUFU'
    if base in CONVERT:
        return 'convert', None, machine.convert, 'convert'
    if base == 'SHFL':
        return 'mio', None, machine.shuffle, 'SHFL'
    if base == 'MOVM':
        return 'mio', None, machine.ldsm, 'MOVM'
    if base in MIO:
        return 'mio', None, 0, 'other'
    if base in ('S2R', 'S2UR'):
        return 'misc', None, machine.special_register, 'S2R'
    if base in ('LDC', 'ULDC', 'LDCU'):
        return 'misc', None, machine.constant_load, 'LDC'
    if base in CONTROL:
        return ('branch' if base in ('BRA', 'CALL', 'RET', 'EXIT') else 'misc'), None, 0, 'other'
    if base.startswith('U') or base in ('R2UR', 'VOTEU'):
        return 'uniform', None, machine.uniform, 'uniform'
    return 'alu', None, machine.other, 'fixed'


def waits_for(x: Instruction) -> tuple[int, int] | None:
    """(queue, entries that may remain) of an instruction that waits for asynchronous copies or products."""
    left = int(x.args[-1], 16) if x.args and x.args[-1].startswith('0x') else 0
    if x.base == 'DEPBAR' and (m := re.match(r'SB(\d+)', x.args[0])):
        return int(m[1]), left
    return (WGMMA_QUEUE, left) if x.base == 'WARPGROUP' and 'DEPBAR' in x.parts else None


def prepare(program: Program, machine: Machine) -> list[Static]:
    statics = []
    for x in program.code:
        pipe, occupancy, latency, kind = pipe_of(x, machine)
        statics.append(Static(
            pipe, machine.occupancy.get(pipe, 1) if occupancy is None else occupancy, latency, kind, max(x.stall, 1), x.wait,
            x.write_barrier, x.read_barrier, source_registers(x), waits_for(x), FLAGS.get(x.base, 0),
        ))
    return statics
