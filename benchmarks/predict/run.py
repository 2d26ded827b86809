"""Predicted times of the kernels on a GPU, without one, what their cycles go to, and how far off they may be.

    python -m benchmarks predict [--pass diagonal_fwd ...] [--K 16 ...] [--shape 8,2048,4096 ...] [--gpu H100] [--json FILE]

The launches are those of the wrappers, compiled for the GPU; `offgpu/predict` times them. The constants of its model are in
its `machine.py`; `--set dram=700` changes one. A row's error bar is that of published timings of kernels like it
(`python -m benchmarks calibrate`). Too little is published to simulate a B200: `--gpu B200` gives bounds.

Needs gcc, no GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.calibration.errors import with_error_bars
from benchmarks.calibration.tuning import Tuning, predict_tuned
from benchmarks.calibration.walks import KEPT, Walks
from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from benchmarks.predict.bounds import bounds, describe_bounds
from benchmarks.predict.calls import GATED, PASSES, PEERS, SCALAR, Shape
from benchmarks.predict.floors import floor_of, needed_bytes
from offgpu.predict.machine import MACHINES, Machine, changed
from offgpu.predict.times import Prediction

# of the paper's 1.3B layer (B=8) and others: many sequences, and one long one
SHAPES = ((8, 2048, 4096), (64, 2048, 1536), (1, 131072, 4096))
STATE_SIZES = (16, 64, 128)
# what the error bars are by
CALIBRATION = Path(__file__).parents[1] / 'results' / 'calibration.json'
# where other GPUs and other operators are predicted too
MAIN_SHAPE = SHAPES[0]


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
        'dram_ms': round(p.dram_seconds * 1e3, 4), 'registers': p.registers, 'spills': p.spills, 'blocks': p.blocks,
        'resident': p.resident, 'warps': p.num_warps, 'configuration': p.configuration, 'causes': causes([p]),
        'notes': p.notes,
    }


def measure(name: str, s: Shape, machine: Machine, tuning: Tuning, walks: Walks, plain: bool = False) -> dict:
    """One row: a pass's predicted time, its floors and what its kernels' cycles went to."""
    started = time.perf_counter()
    call = {**PASSES, **GATED, **PEERS, **SCALAR}[name](s, plain)
    parts = predict_tuned(call, s.T, machine, tuning, walks)
    work = s.B * s.T * s.V
    row = {
        'gpu': machine.name, **asdict(s), 'pass': name, 'plain': plain, 'ms': round(sum(p.seconds for p in parts) * 1e3, 4),
        'bytes': round(sum(p.dram_bytes for p in parts) / work, 2),
        'instructions': round(32 * sum(p.instructions for p in parts) / work, 1),
        'causes': causes(parts), 'kernels': [kernel_row(p) for p in parts],
        'seconds': round(time.perf_counter() - started, 1),
    }
    if name in PASSES:
        floor = floor_of(name, s, machine, plain)
        row |= {
            'bytes_needed': round(needed_bytes(s, name.split('_')[1], plain), 2), 'instructions_needed': floor.instructions,
            'dram_floor_ms': round(floor.dram_seconds * 1e3, 4), 'issue_floor_ms': round(floor.issue_seconds * 1e3, 4),
            'ratio': round(row['ms'] / (floor.seconds * 1e3), 2),
        }
    return row


def describe(row: dict) -> str:
    sizes, plain = ' '.join(f'{n}={row[n]}' for n in 'BTVK'), ' plain' if row['plain'] else ''
    title = f'{row["gpu"]} {row["pass"]} {sizes}{plain}: {row["ms"]:.3f} ms'
    if 'ratio' in row:
        title += f', floors: DRAM {row["dram_floor_ms"]:.3f}, issue {row["issue_floor_ms"]:.3f}, ratio {row["ratio"]}'
    title += f'; bytes {row["bytes"]} of {row.get("bytes_needed", "?")}, instructions {row["instructions"]}'
    lines = [title + f'  ({row["seconds"]} s)']
    for k in row['kernels']:
        what = ', '.join(f'{name} {share:.0%}' for name, share in k['causes'])
        lines.append(
            f'    {k["kernel"]:42}{k["ms"]:9.4f} ms  issue {k["issue_ms"]:.4f}  dram {k["dram_ms"]:.4f}  '
            f'{k["registers"]} registers, {k["spills"]} spills, {k["blocks"]} blocks, {k["resident"]} an SM of {k["warps"]} '
            f'warps: {what}'
        )
        lines += [f'        note: {note}' for note in k['notes']]
    return '\n'.join(lines)


def plan(options: argparse.Namespace) -> list[tuple[str, str, Shape, bool]]:
    """(GPU, pass, shape, plain) of each row: all, or those selected by the options."""
    names, sizes, shapes = options.passes or [*PASSES], options.K or STATE_SIZES, options.shape or SHAPES
    rows = [(options.gpu or 'H100', n, Shape(*shape, K), options.plain) for shape in shapes for K in sizes for n in names]
    if not (options.passes or options.K or options.shape or options.gpu):
        rows += [('H100', n, Shape(*MAIN_SHAPE, K), False) for n in PEERS for K in STATE_SIZES]
        rows += [('A100', n, Shape(*MAIN_SHAPE, 16), False) for n in PASSES]
        rows += [('B200', n, Shape(*MAIN_SHAPE, K), False) for n in PASSES for K in STATE_SIZES]
    return rows


def shape_argument(text: str) -> tuple[int, ...]:
    shape = tuple(int(x) for x in text.split(','))
    if len(shape) != 3 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f'wants B,T,V, got {text}')
    return shape


def known_rows(path: str | None, report: dict) -> list[dict]:
    """Those that the file has of the report's commit."""
    old = json.loads(Path(path).read_text()) if path and os.path.exists(path) else None
    return old['rows'] if old and old['machine']['commit'] == report['machine']['commit'] else []


def machine_of(name: str, changes: list[str]) -> Machine:
    if name not in MACHINES:
        raise ValueError(f"gpu must be one of {sorted(MACHINES)}, got {name}: no others' constants are known to us")
    return changed(MACHINES[name](), changes)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks predict', description='Predict kernel times without a GPU.')
    names = [*PASSES, *GATED, *PEERS, *SCALAR]
    parser.add_argument('--pass', dest='passes', nargs='+', choices=names, metavar='PASS', help=', '.join(names))
    parser.add_argument('--K', type=int, nargs='+')
    parser.add_argument('--shape', type=shape_argument, nargs='+', metavar='B,T,V')
    parser.add_argument('--gpu', help=', '.join(MACHINES))
    parser.add_argument('--plain', action='store_true', help='without z, D and logits of beta')
    parser.add_argument('--set', nargs='+', default=[], metavar='FIELD=VALUE', help='constants of the machine')
    parser.add_argument('--json', metavar='FILE', help='file for the rows; its rows of this commit are kept')
    options = parser.parse_args(args)
    report = {'machine': describe_machine(), 'rows': []}
    report['rows'] = known_rows(options.json, report)
    calibration = json.loads(CALIBRATION.read_text())['rows']
    walks, tuning = Walks(KEPT), Tuning(KEPT)
    done = {(r['gpu'], r['pass'], Shape(*(r[n] for n in 'BTVK')), r['plain']) for r in report['rows']}
    for key in plan(options):
        if key in done:
            continue
        gpu, name, s, plain = key
        machine = machine_of(gpu, options.set)
        if machine.timed:
            row = measure(name, s, machine, tuning, walks, plain)
            print(describe(row), flush=True)
        elif name in PASSES:
            row = bounds(name, s, machine, plain)
            print(describe_bounds(row), flush=True)
        else:
            raise ValueError(f'pass must be one of {sorted(PASSES)} for {gpu}, whose latencies are not known, got {name}')
        report['rows'].append(row)
        if options.json:
            write_report(with_error_bars(report, calibration), options.json)
    return 0
