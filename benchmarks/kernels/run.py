"""Compiles the kernels of a training step for several GPUs: shared memory, registers, spills, loops, seconds.

    python -m benchmarks kernels [--targets sm_90 gfx942] [--K 16 64] [--json benchmarks/results/kernels.json]

One process; no GPU. Seconds are those of the processor, of Triton and its assembler, without Triton's cache. Rows that the
file has are kept: delete it, or some of its rows, to compile again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triton import knobs

from benchmarks.kernels.launches import Call, Outcome, run_call
from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from offgpu.absent_device import TARGETS

CARDS = ('sm_80', 'sm_86', 'sm_89', 'sm_90', 'sm_100', 'sm_120', 'gfx942')
# in the order of what is used most
STATE_SIZES = (16, 32, 64, 128)
UPDATES = ('diagonal', 'exact')
# characters of a column
WIDTHS = {
    'target': 10, 'update': 10, 'K': 5, 'kernel': 46, 'shared': 8, 'registers': 11, 'spills': 8, 'loops': 7, 'seconds': 9,
}
SHAPE = dict(B=8, T=2048, V=4096)


def training_call(update: str, K: int, g: str | None = None, kept: bool = False) -> Call:
    """As the layer calls the operator in training, in bfloat16, with a decay per 'head' or 'channel'; `kept`: updates are."""
    options: dict[str, Any] = dict(layout='view', sigmoid=True, D=True, z=True, disable_recompute=kept)
    return Call(exact=update == 'exact', K=K, g=g, **options, **SHAPE)


def by_kernel(outcome: Outcome) -> Iterable[dict]:
    """The kernels of a call; of one that is launched in several forms, the most that one requires, and all seconds."""
    launches: dict[str, dict[str, dict]] = {}
    for x in outcome.launches:
        # a form that is launched again has the same figures
        launches.setdefault(x['kernel'], {})[json.dumps(x)] = x
    for kernel, forms in launches.items():
        most = {name: max(x[name] or 0 for x in forms.values()) for name in ('shared', 'registers', 'spills')}
        # on AMD no loops are found
        loops = max((x['loops'] for x in forms.values()), key=lambda loops: max(loops, default=0))
        yield {'kernel': kernel, **most, 'loops': loops, 'seconds': round(sum(x['seconds'] for x in forms.values()), 1)}


def line(row: dict) -> str:
    """A row of the table on the screen, with the longest loop; `--json` has all."""
    if 'error' in row:
        return f'{row["target"]:>10}{row["update"]:>10}{row["K"]:>5}  failed: {row["error"]}'
    loops = row['loops']
    shown = row | {'loops': max(loops, default='-') if isinstance(loops, list) else loops}
    return ''.join(f'{shown[name]!s:>{width}}' for name, width in WIDTHS.items())


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks kernels', description=__doc__.splitlines()[0])
    parser.add_argument('--targets', nargs='+', choices=list(TARGETS), default=CARDS)
    parser.add_argument('--K', nargs='+', type=int, default=STATE_SIZES)
    parser.add_argument('--json', type=timing.report_file, metavar='FILE', help='write the figures here, after each call')
    options = parser.parse_args(args)
    knobs.compilation.always_compile = True
    print(line({name: name for name in WIDTHS} | {'update': 'form'}), flush=True)
    old = json.loads(Path(options.json).read_text()) if options.json and Path(options.json).exists() else {'rows': []}
    report: dict = {'machine': describe_machine(), **SHAPE, 'rows': old['rows']}
    done, failed = {(x['target'], x['update'], x['K']) for x in report['rows']}, 0
    for call in ((target, update, K) for K in options.K for target in options.targets for update in UPDATES):
        if call in done:
            continue
        target, update, K = call
        outcome = run_call(training_call(update, K), target, 'code')
        about = dict(target=target, update=update, K=K)
        rows = [about | row for row in by_kernel(outcome)] if outcome.error is None else [about | {'error': outcome.error}]
        for row in rows:
            print(line(row), flush=True)
        report['rows'] += rows
        failed += outcome.error is not None
        if options.json:
            timing.write_report(report, options.json)
    if options.json:
        print(f'written to {options.json}')
    return 1 if failed else 0
