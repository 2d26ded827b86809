"""Matrix products: `mma.sync` of a warp and `wgmma` of four."""

from __future__ import annotations

import numpy as np

from offgpu.emulator import formats, warp
from offgpu.emulator.instructions.decoding import decoder, note_granule, numbers_of, sources_of
from offgpu.emulator.parse import Unsupported, Vector

# bytes of an element, its value in float32, its bits
MATRIX_TYPES = {
    'bf16': (2, formats.from_bf16, np.uint16), 'f16': (2, formats.from_f16, np.uint16),
    'tf32': (4, formats.cut_tf32, np.uint32),
}



@decoder('mma')
def _(program, x, modifiers):
    shape = modifiers[2]
    of, kind, kind_b, to = modifiers[5:9]
    if modifiers[:2] != ('sync', 'aligned') or modifiers[3:5] != ('row', 'col') or kind not in MATRIX_TYPES:
        raise Unsupported(x.text)
    if not shape.startswith('m16n8k') or kind != kind_b or (of, to) != ('f32', 'f32'):
        raise Unsupported(x.text)
    numbers = numbers_of(program, x.operands[0])
    a, b, c = (sources_of(program, y, z) for y, z in zip(x.operands[1:], ('b32', 'b32', 'f32'), strict=True))

    def run(m):
        m.whole_warps(x)
        fragments = [[m.by_warp(y(m.registers)) for y in part] for part in (a, b, c)]
        for number, value in zip(numbers, warp.matrix_product(kind, *fragments), strict=True):
            m.put(number, value.reshape(-1))
        m.counts['matrix products'] += 1
    return run


@decoder('wgmma')
def _(program, x, modifiers):
    """A product of a warp group, executed when issued; at the wait, its operands must be unchanged."""
    if modifiers[0] in ('fence', 'commit_group'):
        return group_mark(x, commits=modifiers[0] == 'commit_group')
    if modifiers[0] == 'wait_group':
        return group_wait(x, x.operands[0].value)
    return group_product(program, x, modifiers)


def group_mark(x, commits):
    def run(m):
        m.whole_warps(x)
        if commits:
            for product in m.products:
                product['age'] += 1
    return run


def group_wait(x, pending):
    def run(m):
        left = []
        for product in m.products:
            if product['age'] <= pending:
                left.append(product)
                continue
            again = np.empty_like(product['data'])
            m.memory('shared', False, product['address'], product['lanes'], again, product['instruction'])
            if (again != product['data']).any():
                m.report('wgmma operand overwritten before the wait', product['instruction'], f'waited for by {x.line}')
        m.products = left
    return run


def group_product(program, x, modifiers):
    _, _, _, shape, to, kind, kind_b = modifiers
    if modifiers[:3] != ('mma_async', 'sync', 'aligned') or to != 'f32' or kind != kind_b or kind not in MATRIX_TYPES:
        raise Unsupported(x.text)
    size, convert, unit_type = MATRIX_TYPES[kind]
    columns, k = (int(y) for y in shape.removeprefix('m64n').split('k'))
    d, a, b, scale_d, *immediates = x.operands
    signs, transposed = [y.value for y in immediates[:2]], [y.value for y in immediates[2:]]
    in_registers = isinstance(a, Vector)
    k_major_a = in_registers or not transposed or not transposed[0]
    k_major_b = not transposed or not transposed[-1]
    numbers, old = numbers_of(program, d), sources_of(program, d, 'f32')
    # registers of the first operand, or its one descriptor
    first = sources_of(program, a, 'b32' if in_registers else 'u64')
    second, keep = program.source(b, 'u64'), program.source(scale_d, 'pred')
    row, column = warp.accumulator_places(len(numbers))
    note_granule(program, 'shared', size)

    def matrix(m, bits, lanes, rows, k_major):
        """One operand from shared memory, read by one lane of each warp that needs it."""
        address, places = warp.described_addresses(bits, rows, k * size, size, k_major)
        n = len(address)
        address, lanes = np.tile(address, len(lanes)), np.repeat(lanes, n)
        data = np.empty((len(lanes), 16), np.uint8)
        m.memory('shared', False, address, lanes, data, x, asynchronous=True)
        m.products.append({'address': address, 'lanes': lanes, 'data': data, 'age': 0, 'instruction': x})
        return convert(warp.place_units(data[:n].view(unit_type), places, rows, k, k_major))

    def uniform(values, lanes):
        if np.ndim(values) == 0:
            return int(values)
        if (values[lanes] != values[lanes[0]]).any():
            raise Unsupported(f'{x.text} with descriptors that differ in a warp group')
        return int(values[lanes[0]])

    def run(m):
        m.whole_warps(x)
        results = [m.by_warp(y(m.registers)).copy() for y in old]
        rows = warp.rows_of_registers(kind, [m.by_warp(y(m.registers)) for y in first]) if in_registers else None
        active = np.ones(m.n // 32, np.bool_) if m.mask is None else m.mask.reshape(-1, 32).all(1)
        scale = m.spread(keep(m.registers))
        for group in range(0, m.n // 32, 4):
            if not active[group:group + 4].any():
                continue
            if not active[group:group + 4].all() or m.lanes_of_block % 128:
                raise Unsupported(f'{x.text} by part of a warp group')
            lanes = np.arange(32 * group, 32 * group + 128)
            leaders = lanes[::32]
            B = matrix(m, uniform(second(m.registers), lanes), leaders, columns, k_major_b) * np.float32(signs[1])
            if rows is not None:
                A = rows[group:group + 4]
            else:
                A = matrix(m, uniform(first[0](m.registers), lanes), leaders, 64, k_major_a).reshape(4, 16, k)
            product = (A * np.float32(signs[0])).astype(np.float64) @ B.T.astype(np.float64)
            for i, c in enumerate(results):
                value = product[:, row[i], column[i]]
                if scale[lanes[0]]:
                    value = value + c[group:group + 4]
                c[group:group + 4] = value
        for number, value in zip(numbers, results, strict=True):
            m.put(number, value.reshape(-1))
        m.counts['matrix products'] += 1
    return run
