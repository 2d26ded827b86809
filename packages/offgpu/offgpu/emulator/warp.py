"""Operations across the 32 lanes of a warp: shuffles, matrix products, ldmatrix and stmatrix. Arrays are `[warps, 32]`."""

from __future__ import annotations

import numpy as np

from offgpu.emulator.formats import HALF, cut_tf32, high, low

LANE = np.arange(32)
# a lane's place in fragments: its group of four, and itself in the group
G, T = LANE // 4, LANE % 4


def shuffle(kind: str, value, b, c):
    """(what each lane gets, whether its source is in range, source lane)."""
    b, c = np.broadcast_to(b, value.shape).astype(np.int64), np.broadcast_to(c, value.shape).astype(np.int64)
    amount, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    least = LANE & segment
    most = least | (clamp & ~segment & 31)
    source = {
        'up': LANE - amount, 'down': LANE + amount, 'bfly': LANE ^ amount, 'idx': least | (amount & ~segment & 31),
    }[kind]
    inside = source >= most if kind == 'up' else source <= most
    source = np.where(inside, source, LANE)
    return np.take_along_axis(value, source, 1), inside, source


def rows_of_registers(kind: str, registers: list[np.ndarray]) -> np.ndarray:
    """A warp's 16 rows of the first operand `[warps, 16, k]` from two or four registers."""
    warps, count = registers[0].shape[0], len(registers)
    if kind == 'tf32':
        A = np.zeros((warps, 16, 2 * count), np.float32)
        for i, r in enumerate(registers):
            A[:, G + 8 * (i % 2), T + 4 * (i // 2)] = cut_tf32(r)
        return A
    A = np.zeros((warps, 16, 4 * count), np.float32)
    for i, r in enumerate(registers):
        for half, part in enumerate((low, high)):
            A[:, G + 8 * (i % 2), 2 * T + half + 8 * (i // 2)] = HALF[kind][0](part(r))
    return A


def columns_of_registers(kind: str, registers: list[np.ndarray]) -> np.ndarray:
    """The second operand of mma.sync `[warps, k, 8]` from one or two registers."""
    warps, count = registers[0].shape[0], len(registers)
    if kind == 'tf32':
        B = np.zeros((warps, 4 * count, 8), np.float32)
        for i, r in enumerate(registers):
            B[:, T + 4 * i, G] = cut_tf32(r)
        return B
    B = np.zeros((warps, 8 * count, 8), np.float32)
    for i, r in enumerate(registers):
        for half, part in enumerate((low, high)):
            B[:, 2 * T + half + 8 * i, G] = HALF[kind][0](part(r))
    return B


def accumulator_places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(row among a warp's 16, column) of each of `count` accumulators of each lane, `[count, 32]`."""
    i = np.arange(count)[:, None]
    return G + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * T + i % 2


def matrix_product(kind: str, a, b, c) -> list[np.ndarray]:
    """mma.sync m16n8 with float32 sums: fragments as lists of registers `[warps, 32]`, c and the result float32."""
    product = rows_of_registers(kind, a).astype(np.float64) @ columns_of_registers(kind, b).astype(np.float64)
    row, column = accumulator_places(4)
    return [(product[:, row[i], column[i]] + c[i].astype(np.float64)).astype(np.float32) for i in range(4)]


def from_rows(rows: np.ndarray, transposed: bool) -> list[np.ndarray]:
    """ldmatrix: registers from matrices `[warps, count, 8, 8]` of 16-bit elements."""
    if transposed:
        rows = rows.swapaxes(2, 3)
    registers = []
    for i in range(rows.shape[1]):
        lo, hi = rows[:, i, G, 2 * T], rows[:, i, G, 2 * T + 1]
        registers.append(lo.astype(np.uint32) | (hi.astype(np.uint32) << np.uint32(16)))
    return registers


def to_rows(registers: list[np.ndarray], transposed: bool) -> np.ndarray:
    """stmatrix: matrices `[warps, count, 8, 8]` of 16-bit elements from registers."""
    rows = np.zeros((registers[0].shape[0], len(registers), 8, 8), np.uint16)
    for i, r in enumerate(registers):
        rows[:, i, G, 2 * T], rows[:, i, G, 2 * T + 1] = low(r), high(r)
    return rows.swapaxes(2, 3) if transposed else rows


def descriptor(bits: int) -> dict:
    """A wgmma matrix descriptor's fields, in bytes; `swizzle` is the number of address bits that are mixed."""
    return {
        'start': (bits & 0x3fff) << 4, 'leading': (bits >> 16 & 0x3fff) << 4, 'stride': (bits >> 32 & 0x3fff) << 4,
        'base': bits >> 49 & 7, 'swizzle': {0: 0, 1: 3, 2: 2, 3: 1}[bits >> 62 & 3],
    }


def described_addresses(bits: int, rows: int, chunks: int, size: int, k_major: bool) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of the 16-byte units of a matrix of `rows` along M or N and `chunks` bytes of K, and each one's place.

    The layouts are those of the PTX ISA's "matrix descriptor" (and CuTe's canonical ones): in a swizzled matrix lines of
    `16 << swizzle` bytes, eight to an atom. Returns addresses `[units]` and each unit's first (row, k) `[units, 2]`.
    """
    d = descriptor(bits)
    if d['base']:
        raise NotImplementedError('wgmma descriptor with a base offset')
    per, line = 16 // size, 1 << d['swizzle']
    k_elements = chunks // size
    if k_major:
        r, u = (x.reshape(-1) for x in np.meshgrid(np.arange(rows), np.arange(chunks // 16), indexing='ij'))
        if d['swizzle']:
            address = r // 8 * d['stride'] + r % 8 * (16 * line) + u * 16
        else:
            address = r // 8 * d['stride'] + r % 8 * 16 + u * d['leading']
        places = np.stack([r, u * per], 1)
    else:
        u, k = (x.reshape(-1) for x in np.meshgrid(np.arange(rows // per), np.arange(k_elements), indexing='ij'))
        if d['swizzle']:
            address = u // line * d['leading'] + u % line * 16 + k // 8 * d['stride'] + k % 8 * (16 * line)
        else:
            address = u * d['stride'] + k // 8 * d['leading'] + k % 8 * 16
        places = np.stack([u * per, k], 1)
    address = address + d['start']
    return address ^ ((address >> 7 & (line - 1)) << 4), places


def place_units(units: np.ndarray, places: np.ndarray, rows: int, k: int, k_major: bool) -> np.ndarray:
    """The matrix `[rows, k]` from its units `[units, elements]`."""
    matrix = np.zeros((rows, k), units.dtype)
    for i in range(units.shape[1]):
        if k_major:
            matrix[places[:, 0], places[:, 1] + i] = units[:, i]
        else:
            matrix[places[:, 0] + i, places[:, 1]] = units[:, i]
    return matrix
