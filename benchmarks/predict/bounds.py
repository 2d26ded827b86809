"""Lower bounds of a pass on a GPU with unknown latencies: the time to issue its kernels' instructions."""

from __future__ import annotations

import time
from dataclasses import asdict

from benchmarks.predict.calls import PASSES, Shape
from benchmarks.predict.floors import floor_of
from offgpu.predict.capture import capture
from offgpu.predict.machine import Machine
from offgpu.predict.times import instructions_of, occupancy


def bounds(name: str, s: Shape, machine: Machine, plain: bool = False) -> dict:
    """A row for a pass: the floors of any implementation and, for ours, the time to issue its instructions."""
    started = time.perf_counter()
    kernels = []
    for launch in capture(PASSES[name](s, plain), s.T, f'sm_{machine.capability}'):
        if launch.binary is None:
            continue
        notes: list[str] = []
        instructions, code = instructions_of(launch, notes), launch.code()
        seconds = instructions / (4 * machine.multiprocessors) / machine.clock
        kernels.append({
            'kernel': launch.kernel, 'issue_ms': round(seconds * 1e3, 4), 'instructions': instructions,
            'registers': code.registers, 'spills': code.spills, 'blocks': launch.blocks, 'warps': launch.num_warps,
            'an_sm_holds': occupancy(launch, machine), 'notes': sorted(set(notes)),
        })
    floor = floor_of(name, s, machine, plain)
    return {
        'gpu': machine.name, **asdict(s), 'pass': name, 'plain': plain,
        'issue_ms': round(sum(k['issue_ms'] for k in kernels), 4),
        'instructions': round(32 * sum(k['instructions'] for k in kernels) / (s.B * s.T * s.V), 1),
        'instructions_needed': floor.instructions, 'dram_floor_ms': round(floor.dram_seconds * 1e3, 4),
        'issue_floor_ms': round(floor.issue_seconds * 1e3, 4), 'kernels': kernels,
        'seconds': round(time.perf_counter() - started, 1),
    }


def describe_bounds(row: dict) -> str:
    lines = [
        ' '.join([row['gpu'], row['pass'], *(f'{n}={row[n]}' for n in 'BTVK')])
        + f': at least {row["issue_ms"]:.3f} ms for {row["instructions"]} instructions; floors: DRAM '
        f'{row["dram_floor_ms"]:.3f}, issue {row["issue_floor_ms"]:.3f}  ({row["seconds"]} s)'
    ]
    for k in row['kernels']:
        lines.append(
            f'    {k["kernel"]:42}issue {k["issue_ms"]:.4f}  {k["registers"]} registers, {k["spills"]} spills, '
            f'{k["blocks"]} blocks, an SM holds {k["an_sm_holds"]} of {k["warps"]} warps'
        )
        lines += [f'        note: {note}' for note in k['notes']]
    return '\n'.join(lines)
