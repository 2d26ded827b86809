"""The path of a warp through a kernel, and the addresses that it touches.

The timing model needs both, so this interprets the integer, predicate and uniform instructions of 32 lanes on which they
depend (:mod:`offgpu.predict.needed`). Loads give zeros, for no kernel here branches on data.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from offgpu.predict.integers import HANDLERS, I32, I64, M32, U32, U64
from offgpu.predict.needed import BRANCHES, IGNORED, LOADS, MEMORY, address_of, inside, needed
from offgpu.sass import Instruction, Program

EVERYTHING = np.ones(32, bool)
# where arguments begin in the constant bank, by compute capability
PARAMETERS = {80: 0x160, 90: 0x210, 100: 0x380}
# where the block's three sizes lie there, and the grid's
SIZES = {80: (0, 12), 90: (0, 12), 100: (0x360, 0x370)}
TENSOR_SPACE = 36


@dataclass(slots=True)
class Access:
    """One warp's memory access. `passes` counts turns of shared memory or L1; sectors, of 32 bytes, are `first + pattern`."""

    space: str
    store: bool
    passes: int
    tensor: str = ''
    pattern: np.ndarray | None = None
    first: int = 0

    @property
    def count(self) -> int:
        return 0 if self.pattern is None else len(self.pattern)


@dataclass
class Trace:
    """A warp's executed instructions: indices into the program, with an `Access` or None for each."""

    steps: list[int] = field(default_factory=list)
    accesses: list[Access | None] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    mixed_branches: int = 0
    complete: bool = False


class Layout:
    """Arguments in the constant bank, and made-up addresses for the tensors."""

    def __init__(self, arguments: list[tuple[str, str, object]], capability: int = 90, hidden: int = 2):
        self.bank, self.capability = bytearray(0x1000), capability
        self.tensors: list[str] = []
        offset = PARAMETERS[capability]
        # Triton adds pointers to scratch memory, which no kernel here has
        extra = [(f'hidden{i}', '*i8', None) for i in range(hidden)]
        for name, kind, value in arguments + extra:
            code = 'Q' if kind.startswith('*') else {'fp32': 'f', 'fp64': 'd', 'i64': 'q', 'u64': 'q'}.get(kind, 'i')
            if kind.startswith('*'):
                value = len(self.tensors) + 1 << TENSOR_SPACE
                self.tensors.append(name)
            size = struct.calcsize(code)
            offset = -(-offset // size) * size
            struct.pack_into('<' + code, self.bank, offset, value)
            offset += size

    def tensor(self, address: int) -> str:
        i = (address >> TENSOR_SPACE) - 1
        return self.tensors[i] if 0 <= i < len(self.tensors) else '?'


@lru_cache(100_000)
def parse(text: str) -> tuple[str, object, bool, bool, bool]:
    """(kind, register or number, negative, inverted, absolute) of an operand."""
    text = text.replace('.reuse', '')
    negative, inverted = text.startswith('-'), text.startswith('~')
    text = text[1:] if negative or inverted else text
    absolute = text.startswith('|')
    text = text.strip('|')
    head = text.split('.')[0]
    if head in ('RZ', 'URZ'):
        return 'number', 0, negative, inverted, absolute
    if m := re.fullmatch(r'(U?R)(\d+)', head):
        return m[1], int(m[2]), negative, inverted, absolute
    if text.startswith('c['):
        return 'constant', text, negative, inverted, absolute
    if text.startswith('0x'):
        return 'number', int(text, 16), negative, inverted, absolute
    try:
        number = float(text.replace('+INF', 'inf').replace('+QNAN', 'nan'))
    except ValueError:
        number = 0.0
    return 'number', struct.unpack('<I', struct.pack('<f', number))[0], negative, inverted, absolute


class Warp:
    """State of a warp of block `block` = (x, y, z) in a grid of `grid` blocks."""

    def __init__(self, program: Program, layout: Layout, block: tuple, grid: tuple, warp: int, num_warps: int):
        self.program, self.layout, self.block, self.grid = program, layout, block, grid
        self.warp, self.num_warps = warp, num_warps
        self.r = np.zeros((257, 32), U32)
        self.p = np.zeros((8, 32), bool)
        self.p[7] = True
        self.ur = [0] * 257
        self.up = [False] * 7 + [True]
        self.lanes = np.arange(32, dtype=U32)
        # words of the stack, where spilled counters and addresses wait
        self.local: dict[int, np.ndarray] = {}
        self.patterns: dict[int, tuple] = {}

    # operands
    def constant(self, text: str, size: int = 4) -> int:
        m = re.match(r'c\[0x([0-9a-f]+)\]\s*\[(.*)\]', text)
        if m is None or int(m[1], 16) != 0:
            return 0
        offset = 0
        for t in m[2].split('+'):
            kind, value, *_ = parse(t)
            offset += self.ur[value] if kind == 'UR' else value if kind == 'number' else int(self.r[value][0])
        return self.bank(offset, size)

    def bank(self, offset: int, size: int) -> int:
        sizes = (self.num_warps * 32, 1, 1), self.grid
        for start, three in zip(SIZES[self.layout.capability], sizes, strict=True):
            if start <= offset < start + 12:
                return three[(offset - start) // 4]
        return int.from_bytes(self.layout.bank[offset:offset + size], 'little')

    def value(self, text: str) -> np.ndarray | int:
        """A 32-bit operand: an array of lanes or a Python int, signs and complements applied."""
        kind, x, negative, inverted, absolute = parse(text)
        if kind == 'R':
            x = self.r[x]
        elif kind == 'UR':
            x = self.ur[x]
        elif kind == 'constant':
            x = self.constant(x)
        if absolute:
            x = np.abs(np.asarray(x, U32).view(I32)).view(U32)
        if negative:
            x = (0 - x.astype(I64)).astype(U32) if isinstance(x, np.ndarray) else -x & M32
        if inverted:
            x = ~x if isinstance(x, np.ndarray) else x ^ M32
        return x

    def u64(self, x) -> np.ndarray:
        return np.full(32, x, U64) if isinstance(x, int) else x.astype(U64)

    def s64(self, x) -> np.ndarray:
        return np.full(32, x if x < 1 << 31 else x - (1 << 32), I64) if isinstance(x, int) else x.view(I32).astype(I64)

    def unsigned(self, text: str) -> np.ndarray:
        return self.u64(self.value(text))

    def signed(self, text: str) -> np.ndarray:
        return self.s64(self.value(text))

    def pair(self, text: str) -> np.ndarray:
        """A 64-bit operand in two registers."""
        kind, x, negative, _, _ = parse(text)
        if kind == 'R':
            x = self.r[x].astype(U64) | self.r[x + 1].astype(U64) << U64(32)
        else:
            x = self.ur[x] | self.ur[x + 1] << 32 if kind == 'UR' else self.constant(x, 8) if kind == 'constant' else x
            x = np.full(32, x, U64)
        return ~x + U64(1) if negative else x

    def predicate(self, text: str) -> np.ndarray:
        inverted = text[0] == '!'
        text = text[1:] if inverted else text
        uniform, i = text[0] == 'U', 7 if text[-1] == 'T' else int(text[-1])
        x = np.full(32, self.up[i]) if uniform else self.p[i]
        return ~x if inverted else x

    def write(self, text: str, x, active: np.ndarray) -> None:
        kind, i, *_ = parse(text)
        if kind == 'number':
            return
        if kind == 'UR':
            if active.any():
                self.ur[i] = int(x if isinstance(x, int) else x[0]) & M32
        elif active is EVERYTHING:
            self.r[i] = x & M32 if isinstance(x, int) else x.astype(U32)
        else:
            np.copyto(self.r[i], np.asarray(x & M32 if isinstance(x, int) else x).astype(U32), where=active)

    def write_pair(self, text: str, x: np.ndarray, active: np.ndarray) -> None:
        kind, i, *_ = parse(text)
        if kind != 'number':
            self.write(f'{kind}{i}', x & U64(M32), active)
            self.write(f'{kind}{i + 1}', x >> U64(32), active)

    def write_predicate(self, text: str, x, active: np.ndarray) -> None:
        if text[-1] == 'T':
            return
        i, x = int(text[-1]), np.broadcast_to(np.asarray(x, bool), (32,))
        if text[0] == 'U':
            self.up[i] = bool(x[0]) if active.any() else self.up[i]
        else:
            self.p[i] = np.where(active, x, self.p[i])

    # addresses
    def addresses(self, text: str) -> np.ndarray:
        """Byte addresses of the lanes."""
        total, wide = np.zeros(32, U64), False
        for token in inside(text).replace('-0x', '+-0x').split('+'):
            token = token.strip()
            kind, x, negative, _, _ = parse(token)
            if token.endswith('.64') or kind == 'UR' and 'desc' in text:
                wide = True
                total = total + self.pair(token)
            elif kind == 'number':
                total = total - U64(x) if negative else total + U64(x)
            elif token:
                scale = re.search(r'\.X(\d+)', token)
                total = total + self.u64(self.value(token.split('.')[0])) * U64(int(scale[1]) if scale else 1)
        return total if wide else total & U64(M32)

    def access(self, i: int, x: Instruction, active: np.ndarray) -> Access | None:
        """The access of instruction `x`; lanes usually lie as they did the last time, so their pattern is kept."""
        addresses = self.addresses(address_of(x))
        if active is not EVERYTHING:
            addresses = addresses[active]
            if not len(addresses):
                return None
        start = int(addresses[0])
        apart = (addresses - addresses[0]).tobytes()
        kept = self.patterns.get(i)
        if kept is None or kept[0] != start & 127 or kept[1] != apart:
            kept = self.patterns[i] = (start & 127, apart, *pattern(x, addresses))
        space, store, passes, sectors = kept[2:]
        if sectors is None:
            return Access(space, store, passes, space)
        return Access(space, store, passes, self.layout.tensor(start), sectors, start >> 5)

    # execution
    def run(self, limit: int = 4_000_000) -> Trace:
        trace, code, wanted, i = Trace(), self.program.code, needed_of(self.program), 0
        steps, accesses = trace.steps, trace.accesses
        while len(steps) < limit:
            x = code[i]
            kind = wanted[i]
            steps.append(i)
            if kind == SKIP:
                accesses.append(None)
                i += 1
                continue
            active = self.predicate(x.guard) if x.guard else EVERYTHING
            if kind == BRANCH:
                accesses.append(None)
                following = self.follow(x, active, trace)
                if following is None:
                    trace.complete = True
                    return trace
                i = following
                continue
            if kind == ACCESS:
                accesses.append(self.access(i, x, active))
                self.move(x, active)
            else:
                accesses.append(None)
                handler = HANDLERS.get(x.base)
                if handler is None:
                    trace.unknown[x.op] = trace.unknown.get(x.op, 0) + 1
                else:
                    handler(self, x, active)
            i += 1
        return trace

    def sectors(self, steps: list[int], positions: list[int], wanted: set[int]) -> tuple[dict[int, int], bool]:
        """The first sectors at the positions `wanted` of a path, were the warp to keep to it; and whether it leaves it."""
        code, kinds, out, left = self.program.code, needed_of(self.program), {}, False
        for position in positions:
            x = code[steps[position]]
            kind = kinds[steps[position]]
            active = self.predicate(x.guard) if x.guard else EVERYTHING
            if kind == BRANCH:
                left |= self.follow(x, active, Trace()) != (steps[position + 1] if position + 1 < len(steps) else None)
            elif kind == ACCESS:
                if position in wanted and active.any():
                    out[position] = int(self.addresses(address_of(x))[active][0]) >> 5
                self.move(x, active)
            elif (handler := HANDLERS.get(x.base)) is not None:
                handler(self, x, active)
        return out, left

    def follow(self, x: Instruction, active: np.ndarray, trace: Trace) -> int | None:
        """The instruction after a branch; None at the end. A branch that some lanes take is counted and not taken."""
        condition = active
        if x.base == 'BRA':
            for a in x.args[:-1]:
                if re.fullmatch(r'!?U?P[T\d]', a):
                    condition = condition & self.predicate(a)
        if not condition.all():
            trace.mixed_branches += bool(condition.any())
            return x.index + 1
        # a trap, at the end: what checks the release of tensor memory reads data
        if x.base in ('EXIT', 'BPT') or x.target == x.index:
            return None
        if x.base == 'RET':
            return self.program.by_address[int(self.r[parse(x.args[0])[1]][0])]
        return x.target

    def move(self, x: Instruction, active: np.ndarray) -> None:
        """What a load leaves in registers: zeros, but for what was spilled."""
        if x.base == 'STL':
            address, (kind, register, *_) = int(self.addresses(x.args[0])[0]), parse(x.args[1])
            for n in range(x.width // 4):
                self.local[address + 4 * n] = self.r[register + n].copy() if kind == 'R' else np.zeros(32, U32)
        elif x.base in LOADS and x.base != 'LDSM':
            result = next((a for a in x.args if re.fullmatch(r'R\d+', a)), None)
            for n in range(max(x.width // 4, 1) if result else 0):
                value = 0
                if x.base == 'LDL':
                    value = self.local.get(int(self.addresses(address_of(x))[0]) + 4 * n, 0)
                self.write(f'R{int(result[1:]) + n}', value, active)


SKIP, BRANCH, ACCESS, HANDLE = range(4)


def needed_of(program: Program) -> list[int]:
    """What to do at each instruction, kept with the program."""
    if not hasattr(program, 'kinds'):
        program.kinds = [
            BRANCH if x.base in BRANCHES else ACCESS if x.base in MEMORY else HANDLE if use and x.base not in IGNORED else SKIP
            for x, use in zip(program.code, needed(program), strict=True)
        ]
    return program.kinds


def pattern(x: Instruction, addresses: np.ndarray) -> tuple[str, bool, int, np.ndarray | None]:
    """(space, store, passes, sectors from the first lane's on) of the lanes' addresses."""
    store = x.base.startswith('ST') or x.base in ('RED', 'ATOMG')
    if x.base in ('LDSM', 'STSM'):
        rows = [int(a) for a in addresses[:8 * (4 if '4' in x.parts else 2 if '2' in x.parts else 1)]]
        passes = sum(bank_passes([a + 4 * i for a in rows[g:g + 8] for i in range(4)], 4) for g in range(0, len(rows), 8))
        return 'shared', store, max(passes, 1), None
    if x.base in ('LDS', 'STS', 'ATOMS'):
        return 'shared', store, bank_passes([int(a) for a in addresses], x.width), None
    if x.base in ('LDL', 'STL'):
        return 'local', store, max(x.width // 4, 1), None
    sectors = np.unique(np.concatenate((addresses >> U64(5), addresses + U64(x.width - 1) >> U64(5)))).astype(I64)
    # an L1 pass serves 128 bytes; lanes of one access may also differ in their lines
    passes = max(len(np.unique(sectors >> 2)), math.ceil(len(sectors) / 4))
    return 'global', store, passes, sectors - (int(addresses[0]) >> 5)


def bank_passes(addresses: list[int], size: int) -> int:
    """Turns of a shared memory access: lanes in groups of 128 bytes, each bank one word a turn."""
    per, words = max(128 // max(size, 4), 1), max(size // 4, 1)
    total = 0
    for i in range(0, len(addresses), per):
        banks: dict[int, set] = {}
        for a in addresses[i:i + per]:
            for w in range((a >> 2), (a >> 2) + words):
                banks.setdefault(w & 31, set()).add(w)
        total += max(len(x) for x in banks.values())
    return max(total, 1)
