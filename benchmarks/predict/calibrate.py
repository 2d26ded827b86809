"""Published timings beside what the model predicts for the same calls: how far predicted times can be trusted.

    python -m benchmarks calibrate [--only chunk_gla ...] [--set dram=700 ...] [--json FILE]

The points and their sources are in `offgpu/calibration`. Points whose package is not installed are left out; fla's kernels are
those of the version at hand. Autotuned kernels have the configurations that FILE names, by an earlier search for the fastest
predicted one, or the faster of two. Walks are kept in `build/walks`. Needs gcc, no GPU, and no TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton.runtime.autotuner import Config

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from offgpu.absent_device import announced
from offgpu.calibration.calls import call_of, package_of, times_alone
from offgpu.calibration.errors import loop_class, summary
from offgpu.calibration.points import Point, read
from offgpu.launches import make_driver
from offgpu.predict.capture import CANDIDATES, capture
from offgpu.predict.machine import Machine, changed, h100
from offgpu.predict.times import predict_pass
from offgpu.predict.walks import KEPT, Walks

# what timing one call adds, from an event before it to the first kernel and from the last one to an event: by the smallest
# calls that Liger published for an H100, 7.3 us, of which a kernel and its launch are 3
EVENTS_SECONDS = 4e-6


def chosen_before(row: dict | None) -> Callable[[str, list[Config]], list[Config]]:
    """The configurations that a row of an earlier table names."""
    names = {k['kernel']: set(re.findall(r'\w+: \w+', k['configuration'])) for k in row['kernels']} if row else {}

    def choose(tuned_for: str, configs: list[Config]) -> list[Config]:
        wanted = names.get(tuned_for.split()[0])
        if not wanted:
            return CANDIDATES(tuned_for, configs)
        return [max(configs, key=lambda c: len(wanted & set(re.findall(r'\w+: \w+', str(c)))))]
    return choose


def measure(point: Point, machine: Machine, walks: Walks, before: dict | None) -> dict:
    """A row of the table: of a point what was published, what is predicted and what with."""
    call, tokens = call_of(point)
    launches = capture(call, tokens, 'sm_90', choose=chosen_before(before))

    def seconds(machine: Machine) -> tuple[float, list]:
        parts = predict_pass(launches, machine, walks.predict)[-1 if times_alone(point) else 0:]
        return sum(p.seconds for p in parts) + (0.0 if times_alone(point) else EVENTS_SECONDS), parts

    (time, parts), (plain, _) = seconds(machine), seconds(changed(machine, ['l0_lines=0']))
    return asdict(point) | {
        'made_with': package_of(point), 'group': point.group, 'predicted_ms': round(time * 1e3, 5),
        'without_fetch_ms': round(plain * 1e3, 5), 'loops': loop_class(p.loops for p in parts),
        'kernels': [{
            'kernel': p.kernel, 'ms': round(p.seconds * 1e3, 5), 'configuration': p.configuration, 'loops': p.loops,
        } for p in parts],
    }


def describe(row: dict) -> str:
    return (
        f'{row["kernel"]:24}{row["direction"]:8}{row["shape"]:24} measured {row["ms"]:9.4f}  predicted '
        f'{row["predicted_ms"]:9.4f}  {row["predicted_ms"] / row["ms"]:.2f}  without fetch '
        f'{row["without_fetch_ms"] / row["ms"]:.2f}  {row["group"]}'
    )


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks calibrate', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--only', nargs='+', metavar='KERNEL', help='points of these kernels')
    parser.add_argument('--set', nargs='+', default=[], metavar='FIELD=VALUE', help='constants of the machine')
    parser.add_argument('--json', metavar='FILE', help='the table: names configurations, and is written')
    options = parser.parse_args(args)
    machine, walks = changed(h100(), options.set), Walks(KEPT)
    path = Path(options.json) if options.json else None
    old = json.loads(path.read_text())['rows'] if path and path.exists() else []
    before = {tuple(row[x] for x in ('gpu', 'kernel', 'shape', 'direction')): row for row in old}
    report: dict[str, Any] = {'machine': describe_machine(), 'constants': asdict(h100()), 'rows': []}
    # fla chooses configurations by the GPU that it finds when it is imported
    with announced(make_driver('sm_90', 'launch')):
        for point in read():
            if package_of(point) is None or options.only and point.kernel not in options.only:
                continue
            row = measure(point, machine, walks, before.get((point.gpu, point.kernel, point.shape, point.direction)))
            report['rows'].append(row)
            print(describe(row), flush=True)
    report['errors'] = summary(report['rows'])
    print(*(f'{name}: {x}' for name, x in report['errors'].items()), sep='\n')
    if path:
        write_report(report, path)
    return 0
