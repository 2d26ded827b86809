"""Loads and stores of global, shared and local memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from offgpu.emulator.formats import TYPES, UNSIGNED
from offgpu.emulator.instructions.decoding import (
    address_of,
    decoder,
    elementwise,
    memory_type,
    note_granule,
    numbers_of,
    sources_of,
)
from offgpu.emulator.memory import KINDS, MISALIGNED
from offgpu.emulator.parse import Address, Instruction, Unsupported

if TYPE_CHECKING:
    from offgpu.emulator.program import Program

# shared by a block or the grid
SPACES = ('global', 'shared')
# address of a thread's local memory in the generic address space
LOCAL_BASE = 1 << 60



@decoder('ld')
def _(program, x, modifiers):
    space = modifiers[0]
    count, kind = memory_type(x)
    target, source = x.operands[:2]
    numbers = numbers_of(program, target)
    dtype: type = TYPES[kind]
    size = np.dtype(dtype).itemsize
    if space == 'param':
        def parameter(m):
            bits = m.parameters[source.base] & ((1 << 8 * size) - 1)
            m.put(numbers[0], np.array(bits, UNSIGNED[8 * size]).view(dtype)[()])
        return parameter
    if space not in SPACES:
        return local_load(program, x)
    if set(modifiers) & {'volatile', 'acquire'}:
        raise Unsupported(x.text)
    address = address_of(program, source)
    note_granule(program, space, size)

    def load(m):
        lanes = m.lanes()
        data = np.empty((len(lanes), count * size), np.uint8)
        m.memory(space, False, address(m, lanes), lanes, data, x)
        words: np.ndarray = data.view(dtype)
        for i, number in enumerate(numbers):
            m.put_lanes(number, lanes, words[:, i])
    return load


@decoder('st')
def _(program, x, modifiers):
    space = modifiers[0]
    count, kind = memory_type(x)
    place, source = x.operands[:2]
    sources = sources_of(program, source, kind)
    dtype: type = TYPES[kind]
    if space not in SPACES:
        return local_store(program, x)
    if set(modifiers) & {'volatile', 'release', 'async'}:
        raise Unsupported(x.text)
    address = address_of(program, place)
    note_granule(program, space, np.dtype(dtype).itemsize)

    def store(m):
        lanes = m.lanes()
        data: np.ndarray = np.empty((len(lanes), count), dtype)
        for i, a in enumerate(sources):
            data[:, i] = m.spread(a(m.registers))[lanes]
        m.memory(space, True, address(m, lanes), lanes, data.view(np.uint8), x)
    return store


def local_columns(program: Program, x: Instruction, place: Address) -> Callable:
    """A function that gives the bytes of each lane's local memory, for each element `[lanes, bytes]`.

    An address without a space is generic; it is an error if it is not in local memory.
    """
    base = program.source(place.base, 'u64')
    count, kind = memory_type(x)
    size = np.dtype(TYPES[kind]).itemsize

    def columns(m, lanes):
        at = m.spread(base(m.registers))[lanes].astype(np.int64) + place.offset - LOCAL_BASE
        if at.min() < 0 or at.max() + count * size > m.program.kernel.local_bytes:
            raise Unsupported(f'{x.text} outside of local memory')
        if (at % (count * size)).any():
            m.report(KINDS[MISALIGNED], x, 'in local memory')
        return [(at + i * size)[:, None] + np.arange(size) for i in range(count)]
    return columns


def local_load(program: Program, x: Instruction) -> Callable:
    """From a thread's own memory."""
    target, place = x.operands[:2]
    columns, numbers = local_columns(program, x, place), numbers_of(program, target)
    dtype = TYPES[memory_type(x)[1]]

    def load(m):
        lanes = m.lanes()
        for number, where in zip(numbers, columns(m, lanes), strict=True):
            m.put_lanes(number, lanes, np.ascontiguousarray(m.local[lanes[:, None], where]).view(dtype)[:, 0])
    return load


def local_store(program: Program, x: Instruction) -> Callable:
    """To a thread's own memory."""
    place, source = x.operands[:2]
    columns, sources = local_columns(program, x, place), sources_of(program, source, memory_type(x)[1])

    def store(m):
        lanes = m.lanes()
        for a, where in zip(sources, columns(m, lanes), strict=True):
            value = np.ascontiguousarray(m.spread(a(m.registers))[lanes])
            m.local[lanes[:, None], where] = value.view(np.uint8).reshape(len(lanes), -1)
    return store


@decoder('cvta')
def _(program, x, modifiers):
    if modifiers != ('local', 'u64'):
        raise Unsupported(x.text)
    return elementwise(program, x, ['u64'], lambda a: a + np.uint64(LOCAL_BASE))
