"""Which instructions the path and the addresses of a warp depend on: the others need not be interpreted.

A register is live where a later address, a guard or a branch may read what it holds. An instruction is needed when it writes
a live register. Plain data flow from the end of the code backwards, with sets as bits of an integer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from offgpu.sass import Instruction, Program

MEMORY = frozenset(('LDG', 'STG', 'LDS', 'STS', 'LDSM', 'STSM', 'LDGSTS', 'LDL', 'STL', 'RED', 'ATOMG', 'ATOMS', 'LD', 'ST'))
LOADS = frozenset(('LDG', 'LDS', 'LDSM', 'LDL', 'LD', 'ATOMG', 'ATOMS'))
BRANCHES = frozenset(('BRA', 'CALL', 'RET', 'EXIT', 'BRX', 'JMP', 'BPT'))
# products and other floating point, whose results never feed an address or a branch here, and synchronisation
IGNORED = frozenset((
    'FFMA', 'FMUL', 'FADD', 'FMNMX', 'FSEL', 'HMMA', 'HGMMA', 'F2FP', 'F2F', 'HADD2', 'HMUL2', 'FSETP', 'NOP', 'WARPSYNC',
    'BSSY', 'BSYNC', 'DEPBAR', 'LDGDEPBAR', 'BAR', 'WARPGROUP', 'MEMBAR', 'ERRBAR', 'FENCE', 'CCTL', 'FCHK', 'DADD', 'DMUL',
    'DFMA', 'FSWZADD', 'MOVM', 'YIELD', 'BMOV', 'HSET2', 'HSETP2', 'I2FP', 'HMNMX2', 'FRND', 'UCGABAR_ARV',
    'UCGABAR_WAIT', 'ENDCOLLECTIVE', 'ACQBULK', 'PREEXIT', 'LEPC', 'NANOSLEEP', 'BREAK', 'UTMACCTL', 'IMMA',
    'FFMA2', 'FMUL2', 'FADD2', 'FHADD', 'LDTM', 'STTM', 'UTCHMMA', 'UTCBAR',
))
NAMES = {'R': (0, 256), 'UR': (256, 128), 'P': (384, 8), 'UP': (392, 8)}
OPERAND = re.compile(r'(?<![\w.])(UR|R|UP|P)(\d+)(\.64)?')
WIDE = frozenset(('WIDE', '64', 'U64', 'S64'))
ALL_PREDICATES, ALL_UNIFORM_PREDICATES = (sum(1 << NAMES[name][0] + i for i in range(7)) for name in ('P', 'UP'))


def register_bits(text: str, wide: bool = False) -> int:
    """The registers that an operand names, the second of a pair with it."""
    bits = 0
    for kind, number, pair in OPERAND.findall(text):
        i = NAMES[kind][0] + int(number)
        bits |= 1 << i
        if kind in ('R', 'UR') and (wide or pair):
            bits |= 1 << i + 1
    return bits


def address_of(x: Instruction) -> str:
    """The operand of a memory access that holds the address."""
    candidates = x.args[1:] if x.base == 'LDGSTS' else x.args
    return next(a for a in candidates if '[' in a and not a.startswith('c['))


def inside(text: str) -> str:
    """What the last brackets of an address hold."""
    return text[text.rindex('[') + 1:text.rindex(']')]


def written(x: Instruction) -> tuple[int, int]:
    """Registers that `x` writes, and how many of its operands are results."""
    args = x.args
    if x.base in LOADS:
        i = next((i for i, a in enumerate(args) if re.fullmatch(r'R\d+', a)), None)
        if i is None:
            return 0, 0
        first = int(args[i][1:])
        count = 4 if x.base == 'LDSM' else max(x.width // 4, 1)
        return sum(1 << first + n for n in range(count)), i + 1
    if x.base == 'R2P':
        return ALL_PREDICATES, 1
    if x.base in MEMORY or x.base in BRANCHES or not args:
        return 0, 0
    if x.base == 'SYNCS':
        # its address may come second
        return register_bits(args[0]) if re.fullmatch(r'U?P\d', args[0]) else 0, 1
    if 'SETP' in x.base or 'PLOP' in x.base:
        return register_bits(','.join(args[:2])), 2
    n = 0
    while n < len(args) and re.fullmatch(r'U?P[T\d]', args[n]):
        n += 1
    if n < len(args):
        n += 1
        while n < len(args) and re.fullmatch(r'U?P[T\d]', args[n]):
            n += 1
    return register_bits(','.join(args[:n]), writes_pair(x)), n


def writes_pair(x: Instruction) -> bool:
    if x.base in ('CS2R', 'CS2UR'):
        return '32' not in x.parts
    return bool(x.parts & WIDE) and x.base not in ('SHF', 'USHF', 'I2F')


def uses(x: Instruction, results: int) -> int:
    bits = register_bits(x.guard)
    if x.base == 'P2R':
        bits |= ALL_PREDICATES
    if x.base == 'UP2UR':
        bits |= ALL_UNIFORM_PREDICATES
    return bits | register_bits(','.join(x.args[results:]), bool(x.parts & WIDE) or 'HI' in x.parts)


class Flow(NamedTuple):
    """Of each instruction, as bits of registers: what it writes, writes whatever its guard, reads, needs to be itself."""

    writes: list[int]
    kills: list[int]
    reads: list[int]
    seeds: list[int]


def flow(program: Program) -> Flow:
    """Memory accesses and branches read nothing for their results, for loads give zeros."""
    out = Flow([], [], [], [])
    for x in program.code:
        bits, count = written(x)
        reads = seed = 0
        if x.base in MEMORY:
            seed = register_bits(x.guard) | register_bits(inside(address_of(x)), 'desc' in address_of(x))
            if x.base == 'LDGSTS':
                seed |= register_bits(x.args[0])
            if x.base == 'STL':
                # a spilled value may be an address
                seed |= register_bits(x.args[1]) * 0xf
        elif x.base in BRANCHES:
            seed = register_bits(x.guard) | register_bits(','.join(x.args), x.base == 'RET')
        else:
            reads = 0 if x.base in IGNORED else uses(x, count)
        # R2P writes only some of them
        for row, value in zip(out, (bits, bits if not x.guard and x.base != 'R2P' else 0, reads, seed), strict=True):
            row.append(value)
    return out


def needed(program: Program) -> list[bool]:
    """For each instruction whether it must be interpreted; memory accesses and branches always are."""
    code, (writes, kills, reads, seeds) = program.code, flow(program)
    returns = [x.index + 1 for x in code if x.base == 'CALL']
    after = []
    for x in code:
        next_ones = [] if x.base == 'EXIT' and not x.guard else [x.index + 1] if x.index + 1 < len(code) else []
        if x.target is not None:
            next_ones.append(x.target)
        if x.base == 'RET':
            next_ones = list(returns)
        after.append(next_ones)
    live = [0] * (len(code) + 1)
    out = [0] * len(code)
    changed = True
    while changed:
        changed = False
        for i in range(len(code) - 1, -1, -1):
            bits = 0
            for j in after[i]:
                bits |= live[j]
            out[i] = bits
            before = bits & ~kills[i] | seeds[i]
            if bits & writes[i]:
                before |= reads[i]
            if before != live[i]:
                live[i] = before
                changed = True
    return [bool(out[i] & writes[i]) for i in range(len(code))]


def needed_at(program: Program, steps: list[int], wanted: set[int]) -> list[int]:
    """Positions in a path that decide its branches and the addresses at the positions `wanted`, which are among them."""
    writes, kills, reads, seeds = flow(program)
    live, out = 0, []
    for position in range(len(steps) - 1, -1, -1):
        i = steps[position]
        base = program.code[i].base
        hit = live & writes[i]
        if hit:
            live = live & ~kills[i] | reads[i]
        # values in the stack are not told apart
        if position in wanted or base in BRANCHES or base == 'STL' or hit and base == 'LDL':
            live |= seeds[i]
        elif not hit:
            continue
        out.append(position)
    return out[::-1]
