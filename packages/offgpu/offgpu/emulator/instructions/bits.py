"""Logic, shifts, bit fields and bytes."""

from __future__ import annotations

import numpy as np

from offgpu.emulator import formats
from offgpu.emulator.instructions.decoding import decoder, elementwise
from offgpu.emulator.parse import Immediate, Unsupported

LOGIC = {'and': np.bitwise_and, 'or': np.bitwise_or, 'xor': np.bitwise_xor, 'not': np.invert}


@decoder(*LOGIC)
def _(program, x, modifiers):
    return elementwise(program, x, [modifiers[-1]] * (len(x.operands) - 1), LOGIC[x.opcode[0]])


@decoder('shl', 'shr')
def _(program, x, modifiers):
    function = formats.shift_left if x.opcode[0] == 'shl' else formats.shift_right
    return elementwise(program, x, [modifiers[-1], 'u32'], function)


@decoder('shf')
def _(program, x, modifiers):
    if modifiers[1] != 'wrap':
        raise Unsupported(x.text)

    def left(a, b, c):
        c = c & np.uint32(31)
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        return ((both << c.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)

    def right(a, b, c):
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        return (both >> (c & np.uint32(31)).astype(np.uint64)).astype(np.uint32)

    return elementwise(program, x, ['u32'] * 3, left if modifiers[0] == 'l' else right)


@decoder('bfe')
def _(program, x, modifiers):
    *_, position, length = x.operands
    bits = int(modifiers[-1][1:])
    if not all(isinstance(y, Immediate) for y in (position, length)) or not 0 <= position.value < bits:
        raise Unsupported(x.text)
    destination, a = program.register(x.operands[0]), program.source(x.operands[1], f'u{bits}')
    return lambda m: m.put(
        destination, formats.bit_field(a(m.registers), position.value, length.value, modifiers[-1][0] == 's'),
    )


@decoder('bfi')
def _(program, x, modifiers):
    *_, position, length = x.operands
    if modifiers[-1] != 'b32' or not all(isinstance(y, Immediate) for y in (position, length)):
        raise Unsupported(x.text)
    mask = np.uint32((((1 << length.value) - 1) << position.value) & 0xffffffff)
    destination = program.register(x.operands[0])
    a, b = (program.source(y, 'u32') for y in x.operands[1:3])
    shift = np.uint32(position.value)
    return lambda m: m.put(destination, (b(m.registers) & ~mask) | ((a(m.registers) << shift) & mask))


@decoder('prmt')
def _(program, x, modifiers):
    if modifiers != ('b32',):
        raise Unsupported(x.text)
    return elementwise(program, x, ['b32'] * 3, formats.permuted)


@decoder('lop3')
def _(program, x, modifiers):
    table = x.operands[4].value
    destination, sources = program.register(x.operands[0]), [program.source(y, 'b32') for y in x.operands[1:4]]
    return lambda m: m.put(destination, formats.logic3([y(m.registers) for y in sources], table))


@decoder('popc')
def _(program, x, modifiers):
    return elementwise(program, x, [modifiers[-1]], lambda a: np.bitwise_count(a).astype(np.uint32))


@decoder('clz')
def _(program, x, modifiers):
    return elementwise(
        program, x, ['b32'], lambda a: (32 - np.ceil(np.log2(a.astype(np.float64) + 1))).astype(np.uint32),
    )
