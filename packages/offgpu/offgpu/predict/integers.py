"""What the integer, predicate and uniform instructions of SASS do to a warp's registers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from offgpu.sass import Instruction

if TYPE_CHECKING:
    from offgpu.predict.warp import Warp

U32, U64, I32, I64 = np.uint32, np.uint64, np.int32, np.int64
M32 = 0xFFFFFFFF
PREDICATE = re.compile(r'U?P[T\d]')


def results(x: Instruction) -> tuple[str, list[str], list[str]]:
    """(register written, predicates written, sources)."""
    args, i = x.args, 1
    while i < len(args) and PREDICATE.fullmatch(args[i]):
        i += 1
    return args[0], args[1:i], args[i:]


def total_of(w: Warp, sources: list[str], carries: list[str], extended: bool) -> np.ndarray:
    """The sum of 32-bit sources as the adder forms it, carries above bit 32."""
    total = np.zeros(32, I64)
    for a in sources:
        if a.startswith('-') and not extended and not a.startswith('-0x'):
            total = total + (w.unsigned('~' + a[1:]).astype(I64) + 1)
        else:
            total = total + w.unsigned(a).astype(I64)
    for c in carries:
        total = total + w.predicate(c).astype(I64)
    return total


def iadd3(w: Warp, x: Instruction, active: np.ndarray) -> None:
    result, predicates, sources = results(x)
    if '64' in x.parts:
        w.write_pair(result, sum((w.pair(a) for a in sources[:3]), np.zeros(32, U64)), active)
        return
    extended = 'X' in x.parts
    total = total_of(w, sources[:3], sources[3:] if extended else [], extended)
    w.write(result, total & M32, active)
    for i, p in enumerate(predicates):
        w.write_predicate(p, (total >> 32) > i, active)


def viadd(w: Warp, x: Instruction, active: np.ndarray) -> None:
    w.write(x.args[0], total_of(w, x.args[1:3], [], False) & M32, active)


def imad(w: Warp, x: Instruction, active: np.ndarray) -> None:
    result, predicates, s = results(x)
    if 'MOV' in x.parts:
        w.write(result, w.value(s[2]), active)
        return
    with np.errstate(over='ignore'):
        if not x.parts & {'WIDE', 'HI'}:
            total = w.unsigned(s[0]) * w.unsigned(s[1]) + w.unsigned(s[2])
            if 'X' in x.parts and len(s) > 3:
                total = total + w.predicate(s[3]).astype(U64)
            w.write(result, total & U64(M32), active)
            return
        if 'U32' in x.parts:
            product = w.unsigned(s[0]) * w.unsigned(s[1])
        else:
            product = (w.signed(s[0]) * w.signed(s[1])).view(U64)
        total = product + w.pair(s[2])
    if 'HI' in x.parts:
        w.write(result, total >> U64(32), active)
        return
    w.write_pair(result, total, active)
    if predicates:
        w.write_predicate(predicates[0], total < product, active)


def lea(w: Warp, x: Instruction, active: np.ndarray) -> None:
    result, predicates, s = results(x)
    if 'HI' not in x.parts:
        negative = s[0].startswith('-')
        total = w.unsigned(s[0].lstrip('-')) << U64(int(s[2], 16)) & U64(M32)
        # a number to subtract enters the adder as its complement and a carry, so that there is no borrow
        total = (total ^ U64(M32)) + U64(1) if negative else total
        total = total + w.unsigned(s[1])
    else:
        if 'SX32' in x.parts:
            shift, rest = int(s[2], 16), s[3:]
            high = (w.signed(s[0]) >> (32 - shift)).view(U64)
        else:
            shift, rest = int(s[3], 16), s[4:]
            high = (w.unsigned(s[0]) | w.unsigned(s[2]) << U64(32)) >> U64(32 - shift)
        total = (high & U64(M32)) + w.unsigned(s[1])
        if 'X' in x.parts and rest:
            total = total + w.predicate(rest[0]).astype(U64)
    w.write(result, total & U64(M32), active)
    for i, p in enumerate(predicates):
        w.write_predicate(p, (total >> U64(32)) > U64(i), active)


def shf(w: Warp, x: Instruction, active: np.ndarray) -> None:
    s, wide = x.args, bool(x.parts & {'U64', 'S64'})
    both = w.unsigned(s[1]) | (w.unsigned(s[3]) if len(s) > 3 else U64(0)) << U64(32)
    shift = w.unsigned(s[2])
    shift = shift & U64(63 if wide else 31) if 'W' in x.parts else np.minimum(shift, U64(64 if wide else 32))
    clipped = np.minimum(shift, U64(63))
    if 'L' in x.parts:
        y = np.where(shift > 63, U64(0), both << clipped)
    elif x.parts & {'S32', 'S64'}:
        y = (both.view(I64) >> clipped.astype(I64)).view(U64)
    else:
        y = np.where(shift > 63, U64(0), both >> clipped)
    w.write(s[0], y >> U64(32) if 'HI' in x.parts else y & U64(M32), active)


def table(a, b, c, entries: int):
    """The function of three bits, in every bit or lane, whose values are the bits of `entries`."""
    y = a & ~a
    for i in range(8):
        if entries >> i & 1:
            y = y | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return y


def lop3(w: Warp, x: Instruction, active: np.ndarray) -> None:
    args, predicate = x.args, None
    if PREDICATE.fullmatch(args[0]):
        predicate, args = args[0], args[1:]
    a, b, c = (w.unsigned(t).astype(U32) for t in args[1:4])
    y = table(a, b, c, int(args[4], 16))
    w.write(args[0], y, active)
    if predicate:
        w.write_predicate(predicate, y != 0, active)


def plop3(w: Warp, x: Instruction, active: np.ndarray) -> None:
    a, b, c = (w.predicate(t) for t in x.args[2:5])
    for i in (0, 1):
        w.write_predicate(x.args[i], table(a, b, c, int(x.args[5 + i], 16)), active)


def isetp(w: Warp, x: Instruction, active: np.ndarray) -> None:
    s, compare = x.args, x.op.split('.')[1]
    if 'U64' in x.parts or 'S64' in x.parts:
        a, b = (w.pair(t) for t in s[2:4])
        a, b = (a, b) if 'U64' in x.parts else (a.view(I64), b.view(I64))
    else:
        a, b = (w.unsigned(t) if 'U32' in x.parts else w.signed(t) for t in s[2:4])
    equal, less = a == b, a < b
    if 'EX' in x.parts:
        low = w.predicate(s[5])
        y = {'EQ': equal & low, 'NE': ~equal | low, 'LT': less | equal & low, 'LE': less | equal & low,
             'GT': ~less & ~equal | equal & low, 'GE': ~less & ~equal | equal & low}[compare]
    else:
        y = {'EQ': equal, 'NE': ~equal, 'LT': less, 'LE': less | equal, 'GT': ~less & ~equal, 'GE': ~less,
             'F': equal & False, 'T': equal | True}[compare]
    join = np.logical_and if 'AND' in x.parts else np.logical_or if 'OR' in x.parts else np.logical_xor
    other = w.predicate(s[4])
    w.write_predicate(s[0], join(y, other), active)
    w.write_predicate(s[1], join(~y, other), active)


def sel(w: Warp, x: Instruction, active: np.ndarray) -> None:
    s = x.args
    w.write(s[0], np.where(w.predicate(s[3]), w.unsigned(s[1]), w.unsigned(s[2])), active)


def prmt(w: Warp, x: Instruction, active: np.ndarray) -> None:
    a, selector, b = (w.unsigned(t) for t in x.args[1:4])
    both, y = a | b << U64(32), np.zeros(32, U64)
    for i in range(4):
        nibble = selector >> U64(4 * i) & U64(15)
        byte = both >> (nibble & U64(7)) * U64(8) & U64(255)
        byte = np.where(nibble & U64(8), np.where(byte & U64(128), U64(255), U64(0)), byte)
        y |= byte << U64(8 * i)
    w.write(x.args[0], y, active)


def sgxt(w: Warp, x: Instruction, active: np.ndarray) -> None:
    n = int(x.args[2], 16)
    y = w.unsigned(x.args[1]) & U64((1 << n) - 1)
    if 'U32' not in x.parts:
        y = np.where(y >> U64(n - 1) & U64(1), y | U64(M32 & ~((1 << n) - 1)), y)
    w.write(x.args[0], y, active)


def iabs(w: Warp, x: Instruction, active: np.ndarray) -> None:
    w.write(x.args[0], np.abs(w.signed(x.args[1])).view(U64), active)


def smaller(w: Warp, x: Instruction, a: np.ndarray, b: np.ndarray, predicate: str, active: np.ndarray) -> None:
    y = np.where(w.predicate(predicate), np.minimum(a, b), np.maximum(a, b))
    w.write(x.args[0], y.astype(I64).view(U64) & U64(M32), active)


def imnmx(w: Warp, x: Instruction, active: np.ndarray) -> None:
    read, (a, b, predicate) = w.unsigned if 'U32' in x.parts else w.signed, results(x)[2][:3]
    smaller(w, x, read(a), read(b), predicate, active)


def viaddmnmx(w: Warp, x: Instruction, active: np.ndarray) -> None:
    smaller(w, x, w.signed(x.args[1]) + w.signed(x.args[2]), w.signed(x.args[3]), x.args[4], active)


def mov(w: Warp, x: Instruction, active: np.ndarray) -> None:
    if '64' in x.parts:
        w.write_pair(x.args[0], w.pair(x.args[1]), active)
    else:
        w.write(x.args[0], w.value(x.args[1]), active)


def r2ur(w: Warp, x: Instruction, active: np.ndarray) -> None:
    result, source = [a for a in x.args if not PREDICATE.fullmatch(a)][:2]
    w.write(result, w.unsigned(source), active)


def s2r(w: Warp, x: Instruction, active: np.ndarray) -> None:
    name = x.args[1]
    if name == 'SR_TID.X':
        value = w.lanes + U32(32 * w.warp)
    elif name == 'SR_LANEID':
        value = w.lanes
    else:
        value = w.block['XYZ'.index(name[-1])] if name.startswith('SR_CTAID') else 0
    w.write(x.args[0], value, active)


def cs2r(w: Warp, x: Instruction, active: np.ndarray) -> None:
    if '32' in x.parts:
        w.write(x.args[0], 0, active)
    else:
        w.write_pair(x.args[0], np.zeros(32, U64), active)


def ldc(w: Warp, x: Instruction, active: np.ndarray) -> None:
    if '64' in x.parts:
        w.write_pair(x.args[0], np.full(32, w.constant(x.args[1], 8), U64), active)
    else:
        w.write(x.args[0], w.constant(x.args[1]), active)


def floats(x: np.ndarray) -> np.ndarray:
    return x.astype(U32).view(np.float32)


def i2f(w: Warp, x: Instruction, active: np.ndarray) -> None:
    if x.parts & {'U64', 'S64'}:
        a = w.pair(x.args[1]).astype(np.float64)
    else:
        a = (w.unsigned if 'U32' in x.parts else w.signed)(x.args[1]).astype(np.float64)
    y = a.astype(np.float32)
    if 'RP' in x.parts:
        y = np.where(y.astype(np.float64) < a, np.nextafter(y, np.float32(np.inf)), y)
    w.write(x.args[0], y.astype(np.float32).view(U32), active)


def f2i(w: Warp, x: Instruction, active: np.ndarray) -> None:
    y = np.nan_to_num(np.trunc(floats(w.unsigned(x.args[1])).astype(np.float64)), nan=0.0, posinf=0.0)
    if 'U64' in x.parts:
        w.write_pair(x.args[0], np.clip(y, 0, 2.0 ** 63).astype(U64), active)
    else:
        w.write(x.args[0], np.clip(y, 0, 2.0 ** 32 - 1).astype(U64), active)


def mufu(w: Warp, x: Instruction, active: np.ndarray) -> None:
    """Of the special functions only the reciprocal, which integer division uses."""
    if 'RCP' in x.parts:
        with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
            w.write(x.args[0], (np.float32(1) / floats(w.unsigned(x.args[1]))).view(U32), active)


def hfma2(w: Warp, x: Instruction, active: np.ndarray) -> None:
    """Of the half precision products only the one that the compiler uses to load a constant."""
    if all(a.lstrip('-') == 'RZ' for a in x.args[1:3]) and len(x.args) >= 5:
        try:
            high, low = (int(np.float16(float(a)).view(np.uint16)) for a in x.args[3:5])
        except ValueError:
            return
        w.write(x.args[0], high << 16 | low, active)


def shfl(w: Warp, x: Instruction, active: np.ndarray) -> None:
    source, other = w.unsigned(x.args[2]), w.unsigned(x.args[3]).astype(I64) & 31
    lanes = w.lanes.astype(I64)
    lanes = {'IDX': other, 'BFLY': lanes ^ other, 'UP': np.maximum(lanes - other, 0),
             'DOWN': np.minimum(lanes + other, 31)}[x.op.split('.')[1]]
    w.write(x.args[1], source[lanes], active)


def vote(w: Warp, x: Instruction, active: np.ndarray) -> None:
    args, p = x.args, w.predicate(x.args[-1])
    if not PREDICATE.fullmatch(args[0]):
        w.write(args[0], sum(1 << i for i in range(32) if p[i] and active[i]), active)
        args = args[1:]
    if PREDICATE.fullmatch(args[0]):
        w.write_predicate(args[0], p.all() if 'ALL' in x.parts else p.any(), active)


def p2r(w: Warp, x: Instruction, active: np.ndarray) -> None:
    value = sum((w.p[i].astype(U64) << U64(i) for i in range(7)), np.zeros(32, U64))
    mask = int(x.args[-1], 16) if x.args[-1].startswith('0x') else 0x7f
    w.write(x.args[0], value & U64(mask), active)


def up2ur(w: Warp, x: Instruction, active: np.ndarray) -> None:
    value = sum(w.up[i] << i for i in range(7))
    w.write(x.args[0], value & int(x.args[-1], 16), active)


def r2p(w: Warp, x: Instruction, active: np.ndarray) -> None:
    value, mask = w.unsigned(x.args[1]), int(x.args[2], 16)
    for i in range(7):
        if mask >> i & 1:
            w.write_predicate(f'P{i}', value >> U64(i) & U64(1), active)


def popc(w: Warp, x: Instruction, active: np.ndarray) -> None:
    w.write(x.args[0], np.array([int(v).bit_count() for v in w.unsigned(x.args[1])], U64), active)


def flo(w: Warp, x: Instruction, active: np.ndarray) -> None:
    w.write(x.args[0], np.array([(int(v).bit_length() - 1) & M32 for v in w.unsigned(x.args[1])], U64), active)


def bmsk(w: Warp, x: Instruction, active: np.ndarray) -> None:
    a, b = (np.minimum(w.unsigned(t), U64(32)) for t in x.args[1:3])
    w.write(x.args[0], ((U64(1) << b) - U64(1)) << a & U64(M32), active)


def elect(w: Warp, x: Instruction, active: np.ndarray) -> None:
    for a in x.args:
        if PREDICATE.fullmatch(a):
            w.write_predicate(a, w.lanes == 0, active)


def succeed(w: Warp, x: Instruction, active: np.ndarray) -> None:
    """What waits for a barrier or asks for tensor memory gets it the first time."""
    if PREDICATE.fullmatch(x.args[0]):
        w.write_predicate(x.args[0], True, active)


HANDLERS = {
    'IADD3': iadd3, 'IADD': iadd3, 'VIADD': viadd, 'IMAD': imad, 'LEA': lea, 'SHF': shf, 'LOP3': lop3, 'PLOP3': plop3,
    'ISETP': isetp, 'SEL': sel, 'PRMT': prmt, 'SGXT': sgxt, 'IABS': iabs, 'IMNMX': imnmx, 'VIMNMX': imnmx,
    'VIADDMNMX': viaddmnmx, 'MOV': mov, 'R2UR': r2ur, 'S2R': s2r, 'S2UR': s2r, 'CS2R': cs2r, 'LDC': ldc, 'I2F': i2f,
    'F2I': f2i, 'MUFU': mufu, 'HFMA2': hfma2, 'SHFL': shfl, 'VOTE': vote, 'P2R': p2r, 'R2P': r2p, 'POPC': popc, 'FLO': flo,
    'BMSK': bmsk, 'ELECT': elect, 'UP2UR': up2ur, 'LDCU': ldc, 'SYNCS': succeed, 'UTCATOMSWS': succeed,
}
# the uniform datapath has these too
HANDLERS |= {'U' + name: HANDLERS[name] for name in (
    'IADD3', 'IMAD', 'LEA', 'SHF', 'LOP3', 'PLOP3', 'ISETP', 'SEL', 'PRMT', 'SGXT', 'MOV', 'LDC', 'POPC', 'FLO', 'BMSK',
    'IABS', 'IMNMX', 'VIADDMNMX', 'VIADD', 'VIMNMX',
)} | {'VOTEU': vote}
