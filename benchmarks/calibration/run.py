"""Published timings beside what the model predicts for the same calls: how far predicted times can be trusted.

    python -m benchmarks calibrate [--only chunk_gla ...] [--known] [--set dram=700 ...] [--json FILE] [--plot FILE.png]

The points and their sources are in `benchmarks/calibration`. Packages that are not installed leave their points out; fla's
kernels are those of the version at hand. What is slow is kept in `build/calibration`, so a run that was ended goes on, and
other constants take a minute. `predicted.json` beside FILE gets its error bars. Needs gcc, no GPU, and a process without
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.calibration.calls import HOST_SECONDS, PACKAGES, WITHOUT_CALL, call_of, package_of, times_alone
from benchmarks.calibration.errors import summary, with_error_bars
from benchmarks.calibration.points import Point, read
from benchmarks.calibration.tuning import Tuning, predict_tuned
from benchmarks.calibration.walks import KEPT, NotKeptError, Walks
from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from offgpu.absent_device import announced
from offgpu.launches import make_driver
from offgpu.predict.machine import MACHINES, Machine, changed
from offgpu.predict.times import Prediction

RESULTS = Path(__file__).parents[1] / 'results'
# what timing one call adds, from an event before it to the first kernel and from the last one to an event: Liger's smallest
# calls on an H100 (relu_squared of 4096 x 128) take 7.3 us, of which a kernel and its launch are 3; on an A100 (rms_norm of
# 2048 x 1024) 13.6, of which 7 are
EVENTS_SECONDS = {'H100': 4e-6, 'A100 80GB': 7e-6}


def kernel_row(p: Prediction) -> dict:
    return {
        'kernel': p.kernel, 'ms': round(p.seconds * 1e3, 5), 'issue_ms': round(p.issue_bound * 1e3, 5),
        'dram_ms': round(p.dram_seconds * 1e3, 5), 'configuration': p.configuration, 'registers': p.registers,
        'causes': [[name, round(x, 2)] for name, x in sorted(p.share.items(), key=lambda item: -item[1])[:3]],
        'notes': p.notes,
    }


def measure(point: Point, machine: Machine, tuning: Tuning, walks: Walks) -> dict:
    """A row of the table: of a point what was published, what is predicted and what with."""
    parts = predict_tuned(*call_of(point), machine, tuning, walks)
    if times_alone(point):
        parts = parts[-1:]
    host = HOST_SECONDS.get((point.kernel, point.direction), 0.0)
    seconds = sum(p.seconds for p in parts) + (0.0 if times_alone(point) else EVENTS_SECONDS[machine.name] + host)
    return asdict(point) | {
        'machine': machine.name, 'made_with': package_of(point), 'group': point.group,
        'predicted_ms': round(seconds * 1e3, 5), 'ratio': round(seconds * 1e3 / point.ms, 3),
        'kernels': [kernel_row(p) for p in parts],
    }


def describe(row: dict) -> str:
    return (
        f'{row["gpu"]:16}{row["kernel"]:24}{row["direction"]:8}{row["shape"]:24} measured {row["ms"]:9.4f}  predicted '
        f'{row["predicted_ms"]:9.4f}  {row["ratio"]:.2f}' + ('' if row['group'] == 'fitted' else f'  {row["group"]}')
    )


def constants() -> dict:
    """Of all GPUs that points are of: a table of other constants is stale."""
    return {name: asdict(make()) for name, make in MACHINES.items() if make().timed}


def own_times() -> list[float]:
    """The shortest and the longest of the times that the results page gives for Longhorn's passes on an H100."""
    rows = json.loads((RESULTS / 'predicted.json').read_text())['rows']
    times = [row['ms'] for row in rows if row['gpu'] == 'H100' and row['pass'].startswith(('diagonal', 'exact'))]
    return [min(times), max(times)]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks calibrate', description='Published timings beside predicted ones.',
    )
    parser.add_argument('--only', nargs='+', metavar='KERNEL', help='points of these kernels')
    parser.add_argument('--set', nargs='+', default=[], metavar='FIELD=VALUE', help='constants of the machine')
    parser.add_argument('--kept', type=Path, default=KEPT, metavar='DIR', help='where walks and tuned configurations are kept')
    parser.add_argument('--known', action='store_true', help='points whose walks and configurations are kept, and no others')
    parser.add_argument('--json', metavar='FILE', help='write the table here')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the table here')
    options = parser.parse_args(args)
    options.kept.mkdir(parents=True, exist_ok=True)
    tuning, walks = Tuning(options.kept, options.known), Walks(options.kept, options.known)
    report = {
        'machine': describe_machine(), 'constants': constants(), 'own_ms': own_times(), 'rows': [], 'not_predicted': [],
    }
    for point in read():
        if options.only and point.kernel not in options.only:
            continue
        if package_of(point) is None:
            why = f'{PACKAGES[point.kernel]} is not there' if point.kernel in PACKAGES else WITHOUT_CALL[point.kernel]
            report['not_predicted'].append(asdict(point) | {'why': why})
            continue
        machine = changed(MACHINES[point.machine](), options.set)
        with announced(make_driver(f'sm_{machine.capability}', 'launch')):
            try:
                report['rows'].append(measure(point, machine, tuning, walks))
            except NotKeptError as error:
                report['not_predicted'].append(asdict(point) | {'why': str(error)})
                continue
        print(describe(report['rows'][-1]), flush=True)
    report['errors'] = summary(report['rows'])
    print(*(f'{name}: {x}' for name, x in report['errors'].items()), sep='\n')
    if options.json:
        write_report(report, options.json)
        predicted = Path(options.json).with_name('predicted.json')
        if predicted.exists():
            write_report(with_error_bars(json.loads(predicted.read_text()), report['rows']), predicted)
    if options.plot:
        from benchmarks.report.calibration import draw
        draw(report, options.plot)
    return 0
