"""Arithmetic of floats and integers, and approximate functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from offgpu.emulator import formats
from offgpu.emulator.formats import TYPES
from offgpu.emulator.instructions.decoding import decoder, elementwise, halved, with_flush
from offgpu.emulator.parse import Unsupported

FLOATS: dict[str, Callable] = {
    'add': np.add, 'sub': np.subtract, 'mul': np.multiply, 'min': np.fmin, 'max': np.fmax, 'fma': formats.fma,
    'neg': np.negative, 'abs': np.abs,
}
INTEGERS: dict[str, Callable] = {
    'add': np.add, 'sub': np.subtract, 'min': np.minimum, 'max': np.maximum, 'neg': np.negative, 'abs': np.abs,
    'div': formats.truncated_division,
}


@decoder('add', 'sub', 'min', 'max', 'fma', 'neg', 'abs')
def _(program, x, modifiers):
    name, kind = x.opcode[0], modifiers[-1]
    if set(modifiers[:-1]) - {'rn', 'ftz', 'lo', 'NaN'}:
        raise Unsupported(x.text)
    if kind in ('f32', 'f64', 'f16', 'bf16', 'f16x2', 'bf16x2'):
        function = {'min': np.minimum, 'max': np.maximum}[name] if 'NaN' in modifiers else FLOATS[name]
        if kind == 'f64' and name == 'fma':
            raise Unsupported(x.text)
        function = with_flush(function, modifiers) if kind == 'f32' else function if kind == 'f64' else halved(function, kind)
    else:
        function = INTEGERS[name]
    return elementwise(program, x, [kind] * (len(x.operands) - 1), function)


@decoder('mul')
def _(program, x, modifiers):
    kind = modifiers[-1]
    if kind == 'f32':
        return elementwise(program, x, [kind] * 2, with_flush(np.multiply, modifiers))
    if kind == 'f64':
        return elementwise(program, x, [kind] * 2, np.multiply)
    if kind in ('f16', 'bf16', 'f16x2', 'bf16x2'):
        return elementwise(program, x, [kind] * 2, halved(np.multiply, kind))
    if modifiers[0] == 'lo':
        return elementwise(program, x, [kind] * 2, np.multiply)
    if modifiers[0] == 'hi':
        return elementwise(program, x, [kind] * 2, formats.high_product)
    wide = widened(kind)
    return elementwise(program, x, [kind] * 2, lambda a, b: a.astype(wide) * b.astype(wide))


def widened(kind: str):
    return TYPES[f'{kind[0]}{2 * int(kind[1:])}']


@decoder('mad')
def _(program, x, modifiers):
    how, kind = modifiers[0], modifiers[-1]
    if how == 'wide':
        wide = widened(kind)
        return elementwise(
            program, x, [kind, kind, f'{kind[0]}{2 * int(kind[1:])}'], lambda a, b, c: a.astype(wide) * b.astype(wide) + c,
        )
    if how == 'lo':
        return elementwise(program, x, [kind] * 3, lambda a, b, c: a * b + c)
    if how == 'hi':
        return elementwise(program, x, [kind] * 3, lambda a, b, c: formats.high_product(a, b) + c)
    raise Unsupported(x.text)


@decoder('div')
def _(program, x, modifiers):
    if modifiers[-1] == 'f32':
        function = formats.approximate_division if 'approx' in modifiers else np.divide
        return elementwise(program, x, ['f32'] * 2, with_flush(function, modifiers))
    return elementwise(program, x, [modifiers[-1]] * 2, formats.truncated_division)


@decoder('rem')
def _(program, x, modifiers):
    return elementwise(program, x, [modifiers[-1]] * 2, lambda a, b: a - formats.truncated_division(a, b) * b)


FUNCTIONS: dict[str, Callable] = {
    'ex2': np.exp2, 'lg2': np.log2, 'rcp': lambda a: np.float32(1) / a, 'sqrt': np.sqrt,
    'rsqrt': lambda a: np.float32(1) / np.sqrt(a), 'sin': np.sin, 'cos': np.cos, 'tanh': np.tanh,
}


@decoder(*FUNCTIONS)
def _(program, x, modifiers):
    if modifiers[-1] != 'f32':
        raise Unsupported(x.text)
    return elementwise(program, x, ['f32'], with_flush(FUNCTIONS[x.opcode[0]], modifiers))
