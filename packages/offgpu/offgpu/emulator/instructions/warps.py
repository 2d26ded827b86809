"""Instructions across the lanes of a warp: shuffles, matrix rows, barriers, fences."""

from __future__ import annotations

import numpy as np

from offgpu.emulator import warp
from offgpu.emulator.instructions.decoding import address_of, decoder, note_granule, numbers_of, sources_of
from offgpu.emulator.parse import Unsupported, Vector


@decoder('shfl')
def _(program, x, modifiers):
    _, kind, width = modifiers
    first = x.operands[0]
    destination, inside = first.items if isinstance(first, Vector) else (first, None)
    number = program.register(destination)
    predicate = None if inside is None else program.register(inside)
    a, b, c = (program.source(y, 'b32') for y in x.operands[1:4])

    def run(m):
        amounts = [y.reshape(-1, 32) if np.ndim(y) else y for y in (b(m.registers), c(m.registers))]
        got, ok, source = warp.shuffle(kind, m.by_warp(a(m.registers)), *amounts)
        if m.mask is not None:
            active = m.mask.reshape(-1, 32)
            if (active & ~np.take_along_axis(active, source, 1)).any():
                m.report('shuffle from an inactive lane', x, '')
        m.put(number, got.reshape(-1))
        if predicate is not None:
            m.put(predicate, ok.reshape(-1))
    return run


@decoder('ldmatrix', 'stmatrix')
def _(program, x, modifiers):
    count, transposed, write = int(modifiers[3][1:]), 'trans' in modifiers, x.opcode[0] == 'stmatrix'
    if modifiers[2] != 'm8n8' or modifiers[-1] != 'b16':
        raise Unsupported(x.text)
    operand, place = (x.operands[1], x.operands[0]) if write else x.operands
    address = address_of(program, place)
    note_granule(program, 'shared', 2)
    if write:
        sources = sources_of(program, operand, 'b32')
    else:
        numbers = numbers_of(program, operand)

    def run(m):
        m.whole_warps(x)
        lanes = m.lanes()
        # the first lanes of each warp point to the rows
        lanes = lanes[lanes % 32 < 8 * count]
        if write:
            rows = warp.to_rows([m.by_warp(y(m.registers)) for y in sources], transposed)
            if m.mask is not None:
                rows = rows[m.mask.reshape(-1, 32).all(1)]
            data = np.ascontiguousarray(rows.reshape(-1, 8)).view(np.uint8)
            m.memory('shared', True, address(m, lanes), lanes, data, x)
            return
        data = np.empty((len(lanes), 16), np.uint8)
        m.memory('shared', False, address(m, lanes), lanes, data, x)
        rows = data.view(np.uint16).reshape(-1, count, 8, 8)
        lanes = m.lanes()
        for number, value in zip(numbers, warp.from_rows(rows, transposed), strict=True):
            m.put_lanes(number, lanes, value.reshape(-1))
    return run


@decoder('bar', 'barrier')
def _(program, x, modifiers):
    # the other barriers end a block of code
    if modifiers[:1] != ('warp',):
        raise Unsupported(x.text)

    def run(m):
        m.whole_warps(x)
        if m.mask is None:
            m.threads.syncs += 1
        else:
            m.threads.syncs += m.mask.reshape(-1, 32).any(1).astype(np.int32)
    return run


@decoder('activemask')
def _(program, x, modifiers):
    number = program.register(x.operands[0])

    def run(m):
        mask = np.ones(m.n, np.bool_) if m.mask is None else m.mask
        words = (mask.reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        m.put(number, np.repeat(words, 32))
    return run


@decoder('createpolicy')
def _(program, x, modifiers):
    number = program.register(x.operands[0])
    return lambda m: m.put(number, np.uint64(0))


@decoder('fence')
def _(program, x, modifiers):
    if modifiers[:2] != ('proxy', 'async'):
        return None

    def run(m):
        m.threads.clock += 1
        warps = slice(None) if m.mask is None else m.mask.reshape(-1, 32).any(1)
        m.threads.fences[warps] = m.threads.clock
    return run


@decoder('membar', 'griddepcontrol', 'prefetch', 'nanosleep', 'setmaxnreg')
def _(program, x, modifiers):
    return None
