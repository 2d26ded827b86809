"""Asynchronous copies from global to shared memory (`cp.async`)."""

from __future__ import annotations

import numpy as np

from offgpu.emulator.instructions.decoding import address_of, decoder, note_granule
from offgpu.emulator.parse import Unsupported


@decoder('cp')
def _(program, x, modifiers):
    if modifiers[:2] == ('async', 'commit_group'):
        def commit(m):
            lanes = m.lanes()
            for copy in m.copies:
                open_ = (copy['group'] < 0) & np.isin(copy['lanes'], lanes)
                copy['group'][open_] = m.groups[copy['lanes'][open_]]
            m.groups[lanes] += 1
        return commit
    if modifiers[:2] in (('async', 'wait_group'), ('async', 'wait_all')):
        pending = x.operands[0].value if modifiers[1] == 'wait_group' else 0

        def wait(m):
            lanes = m.lanes()
            left = []
            for copy in m.copies:
                mine = np.isin(copy['lanes'], lanes)
                group = copy['group']
                done = mine & (group >= 0) & (group < m.groups[copy['lanes']] - pending)
                if modifiers[1] == 'wait_all':
                    done = mine
                if done.any():
                    m.memory(
                        'shared', True, copy['address'][done], copy['lanes'][done],
                        np.ascontiguousarray(copy['data'][done]), copy['instruction'],
                    )
                if not done.all():
                    keep = ~done
                    left.append({
                        key: value if key == 'instruction' else value[keep] for key, value in copy.items()
                    })
            m.copies = left
        return wait
    if modifiers[0] != 'async' or 'shared' not in modifiers or 'global' not in modifiers or 'bulk' in modifiers:
        raise Unsupported(x.text)
    size = x.operands[2].value
    to = address_of(program, x.operands[0])
    of = address_of(program, x.operands[1])
    used = program.source(x.operands[3], 'u32') if len(x.operands) > 3 else None
    note_granule(program, 'shared', 4)
    note_granule(program, 'global', 4)

    def copy(m):
        lanes = m.lanes()
        data = np.zeros((len(lanes), size), np.uint8)
        bytes_ = np.full(len(lanes), size)
        if used is not None:
            bytes_ = m.spread(used(m.registers))[lanes]
        if not np.isin(bytes_, (0, size)).all():
            raise Unsupported(f'{x.text} with part of its bytes')
        real = bytes_ == size
        source = of(m, lanes)
        part = np.zeros((int(real.sum()), size), np.uint8)
        m.memory('global', False, source[real], lanes[real], part, x)
        data[real] = part
        # written to shared memory at the wait: earlier reads see the old data
        m.copies.append({
            'address': to(m, lanes), 'lanes': lanes, 'data': data, 'group': np.full(len(lanes), -1), 'instruction': x,
        })
    return copy
