"""Predicted times of the kernels on a GPU, without one, what their cycles go to, and how far off they may be.

    python -m benchmarks predict [--pass diagonal_fwd ...] [--K 16 ...] [--shape 8,2048,4096] [--gpu H100] [--json FILE]
    python -m benchmarks predict --pages    # what pages quote, to benchmarks/results/predicted.json: five minutes

The launches are those of the wrappers, compiled for the GPU by the Triton at hand; `offgpu.predict` times them. Its constants
are in `machine.py`; `--set dram=700` changes one. Times are of the GPU: the host may take longer to launch few kernels. A
row's error bar is that of timed passes with loops as long (`python -m benchmarks calibrate`).

Needs gcc, no GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import report_file, write_report
from offgpu.absent_device import announced
from offgpu.calibration.errors import error_bars, loop_class
from offgpu.launches import make_driver
from offgpu.predict.capture import capture
from offgpu.predict.machine import MACHINES, Machine, changed
from offgpu.predict.times import Prediction, predict_pass
from offgpu.predict.walks import KEPT, Walks

# of the paper's 1.3B layer
SHAPE = (8, 2048, 4096)
STATE_SIZES = (16, 32, 64, 128)
RESULTS = Path(__file__).parents[1] / 'results'
# what pages quote
QUOTED = {
    'K': [16, 64],
    'passes': [
        f'{name}_{way}' for name in ('exact', 'diagonal', 'exact_head_gate', 'chunk_delta_rule') for way in ('fwd', 'bwd')
    ],
}
LEGEND = """
A first line is a pass, as the operator launches it; the lines below are its kernels.
bytes, instructions    from and to DRAM, and of one thread, for each token, sequence and channel (B T V)
within                 how far off a prediction may be: the error on timed passes whose loops are as long
issue, dram            the least milliseconds by instructions alone, and by DRAM alone
loops                  instructions in each innermost loop; above 768 they exceed a scheduler's cache
causes, in percent     what the schedulers' cycles went to: `issue` of instructions, `wait X` for the result of X (`LDG k DRAM`
                       is a load of k from DRAM), `pipe X` until the unit X is free, `stall count` fixed latencies, `fetch` of
                       code"""
# milliseconds of the host for a launch in an eager call, by the six of chunk_delta_rule's forward on an H200
HOST_MS = 0.09


def causes(parts: list[Prediction], most: int = 3) -> list[tuple[str, float]]:
    """The causes of the pass's time, the largest first, over all kernels weighted by time."""
    total, sums = sum(p.seconds for p in parts), {}
    for p in parts:
        for name, share in p.share.items():
            sums[name] = sums.get(name, 0.0) + share * p.seconds / total
    return sorted(((n, round(x, 3)) for n, x in sums.items()), key=lambda item: -item[1])[:most]


def kernel_row(p: Prediction) -> dict:
    return {
        'kernel': p.kernel, 'ms': round(p.seconds * 1e3, 4), 'issue_ms': round(p.issue_bound * 1e3, 4),
        'dram_ms': round(p.dram_seconds * 1e3, 4), 'registers': p.registers, 'spills': p.spills, 'loops': p.loops,
        'blocks': p.blocks, 'resident': p.resident, 'warps': p.num_warps, 'configuration': p.configuration,
        'causes': causes([p]), 'notes': p.notes,
    }


def measure(name: str, call: Callable, s: Any, machine: Machine, walks: Walks) -> dict:
    """One row: a pass's predicted time, and what its kernels' cycles went to."""
    started = time.perf_counter()
    parts = predict_pass(capture(call(s), s.T, f'sm_{machine.capability}'), machine, walks.predict)
    work = s.B * s.T * s.V
    return {
        'gpu': machine.name, 'triton': triton.__version__, **asdict(s), 'pass': name,
        'ms': round(sum(p.seconds for p in parts) * 1e3, 4), 'host_ms': round(HOST_MS * len(parts), 2),
        'bytes': round(sum(p.dram_bytes for p in parts) / work, 2),
        'instructions': round(32 * sum(p.instructions for p in parts) / work, 1),
        'loops': loop_class(p.loops for p in parts), 'kernels': [kernel_row(p) for p in parts],
        'seconds': round(time.perf_counter() - started, 1),
    }


def describe(row: dict) -> str:
    within = f' within {row["within"]:.0%}' if 'within' in row else ''
    lines = [
        f'{row["gpu"]}, Triton {row["triton"]}, {row["pass"]} {" ".join(f"{n}={row[n]}" for n in "BTVK")}: GPU '
        f'{row["ms"]:.3f} ms{within}, host about {row["host_ms"]} ms for {len(row["kernels"])} launches; bytes '
        f'{row["bytes"]}, instructions {row["instructions"]}  ({row["seconds"]} s)'
    ]
    for k in row['kernels']:
        what = ', '.join(f'{name} {share:.0%}' for name, share in k['causes'])
        lines.append(
            f'    {k["kernel"]:42}{k["ms"]:9.4f} ms  issue {k["issue_ms"]:.4f}  dram {k["dram_ms"]:.4f}  '
            f'{k["registers"]} registers, {k["spills"]} spills, loops {k["loops"]}, {k["blocks"]} blocks, {k["resident"]} an '
            f'SM of {k["warps"]} warps: {what}'
        )
        lines += [f'        note: {note}' for note in k['notes']]
    return '\n'.join(lines)


def bars() -> dict[str, dict]:
    """By the committed timings: those that others published, and our own passes on an H200."""
    tables = [json.loads((RESULTS / f'{name}.json').read_text())['rows'] for name in ('calibration', 'h200_passes')]
    return error_bars([row for rows in tables for row in rows])


def shape_argument(text: str) -> tuple[int, ...]:
    shape = tuple(int(x) for x in text.split(','))
    if len(shape) != 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f'wants B,T,V, got {text}')
    return shape


def machine_of(name: str, changes: list[str]) -> Machine:
    if name not in MACHINES:
        raise ValueError(f"gpu must be one of {sorted(MACHINES)}, got {name}: no others' constants are known to us")
    return changed(MACHINES[name](), changes)


def main(args: list[str] | None = None) -> int:
    # fla chooses configurations by the GPU that it finds when it is imported
    with announced(make_driver('sm_90', 'launch')):
        from benchmarks.predict.calls import PASSES, PEERS, SELECTABLE, Shape

        parser = argparse.ArgumentParser(prog='python -m benchmarks predict', description=(__doc__ or '').splitlines()[0])
        parser.add_argument(
            '--pass', dest='passes', nargs='+', choices=[*SELECTABLE], metavar='PASS', default=[*PASSES, *PEERS],
            help=', '.join(SELECTABLE),
        )
        parser.add_argument('--K', type=int, nargs='+', default=STATE_SIZES)
        parser.add_argument('--shape', type=shape_argument, default=SHAPE, metavar='B,T,V')
        parser.add_argument('--gpu', default='H200', help=', '.join(MACHINES))
        parser.add_argument('--set', nargs='+', default=[], metavar='FIELD=VALUE', help='constants of the machine')
        parser.add_argument('--json', type=report_file, metavar='FILE', help='file for the rows')
        parser.add_argument('--pages', action='store_true', help='what pages quote')
        options = parser.parse_args(args)
        if options.pages:
            vars(options).update(QUOTED, json=RESULTS / 'predicted.json')
        machine, walks, within = machine_of(options.gpu, options.set), Walks(KEPT), bars()
        report: dict[str, Any] = {'machine': describe_machine(), 'rows': []}
        for K in options.K:
            for name in options.passes:
                row = measure(name, SELECTABLE[name], Shape(*options.shape, K), machine, walks)
                report['rows'].append(row | within.get(row['loops'], {}))
                print(describe(report['rows'][-1]), flush=True)
                if options.pages:
                    del report['rows'][-1]['kernels']
                if options.json:
                    write_report(report, options.json)
    print(LEGEND)
    if options.json:
        print(f'written to {options.json}')
    return 0
