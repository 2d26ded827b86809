"""Comparisons, selects, conversions and moves."""

from __future__ import annotations

import numpy as np

from offgpu.emulator.formats import HALF, TYPES, UNSIGNED, pack
from offgpu.emulator.instructions.decoding import decoder, elementwise
from offgpu.emulator.parse import Unsupported, Vector

COMPARE = {
    'eq': np.equal, 'ne': np.not_equal, 'lt': np.less, 'le': np.less_equal, 'gt': np.greater, 'ge': np.greater_equal,
    'lo': np.less, 'ls': np.less_equal, 'hi': np.greater, 'hs': np.greater_equal,
}


@decoder('setp')
def _(program, x, modifiers):
    name, kind = modifiers[0], modifiers[-1]
    if isinstance(x.operands[0], Vector):
        raise Unsupported(x.text)
    load = HALF[kind][0] if kind in HALF else lambda a: a
    if name == 'ne' and kind in ('f32', 'f64', *HALF):
        # a NaN differs from nothing
        compare = lambda a, b: (a < b) | (a > b)  # noqa: E731
    elif name in COMPARE:
        compare = COMPARE[name]
    elif name in ('nan', 'num'):
        compare = lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == 'nan')  # noqa: E731
    elif name in ('equ', 'neu', 'ltu', 'leu', 'gtu', 'geu'):
        ordered = COMPARE[name[:2]]
        compare = lambda a, b: ordered(a, b) | np.isnan(a) | np.isnan(b)  # noqa: E731
    else:
        raise Unsupported(x.text)
    if len(x.operands) == 3:
        return elementwise(program, x, [kind] * 2, lambda a, b: compare(load(a), load(b)))
    join = {'and': np.logical_and, 'or': np.logical_or, 'xor': np.logical_xor}[modifiers[1]]
    return elementwise(program, x, [kind, kind, 'pred'], lambda a, b, p: join(compare(load(a), load(b)), p))


@decoder('selp')
def _(program, x, modifiers):
    return elementwise(program, x, [modifiers[-1]] * 2 + ['pred'], lambda a, b, p: np.where(p, a, b))


@decoder('cvt')
def _(program, x, modifiers):
    *how, to, of = modifiers
    how = set(how)
    if 'sat' in how or 'relu' in how:
        raise Unsupported(x.text)
    if to in ('bf16x2', 'f16x2'):
        store = HALF[to.removesuffix('x2')][1]
        # the first source becomes the upper half
        return elementwise(program, x, [of] * 2, lambda a, b: pack(store(b), store(a)))
    if of in HALF and to == 'f32':
        return elementwise(program, x, [of], HALF[of][0])
    if of == 'f32' and to in HALF:
        if how - {'rn'}:
            raise Unsupported(x.text)
        return elementwise(program, x, [of], HALF[to][1])
    if of == 'f32' and to == 'tf32':
        if how == {'rna'}:
            return elementwise(program, x, [of], lambda a: (a.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xffffe000))
        if how == {'rn'}:
            return elementwise(program, x, [of], lambda a: (
                a.view(np.uint32) + np.uint32(0xfff) + ((a.view(np.uint32) >> np.uint32(13)) & np.uint32(1))
            ) & np.uint32(0xffffe000))
        raise Unsupported(x.text)
    if of in ('f32', 'f64') and to[0] in 'us':
        rounding = {'rzi': np.trunc, 'rni': np.rint, 'rmi': np.floor, 'rpi': np.ceil}[next(iter(how - {'ftz'}))]
        info, dtype = np.iinfo(TYPES[to]), TYPES[to]
        return elementwise(program, x, [of], lambda a: np.clip(
            np.nan_to_num(rounding(a).astype(np.float64)), info.min, info.max,
        ).astype(dtype))
    if of in HALF or to in HALF:
        raise Unsupported(x.text)
    # integers, and floats from integers
    dtype = TYPES[to]
    return elementwise(program, x, [of], lambda a: a.astype(dtype))


@decoder('mov')
def _(program, x, modifiers):
    kind = modifiers[-1]
    destination, source = x.operands
    if isinstance(destination, Vector):
        parts = [None if y.name == '_' else program.register(y) for y in destination.items]
        a, bits = program.source(source, kind), int(kind[1:]) // len(parts)
        part_type, whole_type = UNSIGNED[bits], TYPES[kind]

        def unpack(m):
            value = a(m.registers)
            for i, number in enumerate(parts):
                if number is not None:
                    m.put(number, (value >> whole_type(i * bits)).astype(part_type))
        return unpack
    if isinstance(source, Vector):
        bits, whole_type = int(kind[1:]) // len(source.items), TYPES[kind]
        sources, number = [program.source(y, f'b{bits}') for y in source.items], program.register(destination)

        def join(m):
            value = whole_type(0)
            for i, a in enumerate(sources):
                value = value | (a(m.registers).astype(whole_type) << whole_type(i * bits))
            m.put(number, value)
        return join
    return elementwise(program, x, [kind], lambda a: a)
