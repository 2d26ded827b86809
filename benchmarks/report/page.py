"""The results page, `docs/results.md`, and the results in the README, from the JSON files in `benchmarks/results/`.

    python -m benchmarks report [--check]

`--check` writes nothing, and fails where a page differs from what the files hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report.models import models
from benchmarks.report.predicted import predicted
from benchmarks.report.summary import replaced, summary
from benchmarks.report.tables import measured_on, milliseconds, place, table

ROOT = Path(__file__).parents[2]
RESULTS, PAGE, README = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'results.md', ROOT / 'README.md'
# those that the README quotes
FIGURES = {
    'cpu_ops': RESULTS / 'cpu_ops.json', 'kernels': RESULTS / 'kernels.json',
    'extrapolation': ROOT / 'experiments' / 'results' / 'extrapolation.json',
}
HEADER = """# Results

`python -m benchmarks report` writes this page from the files in [`benchmarks/results`](../benchmarks/results). Each section
names the command, the device and the commit. What is not on this page has not been measured.
"""
NO_GPU = '**No kernel has been timed on a GPU yet.**\n'


def kernels(rows: list[dict]) -> str:
    """Cost of the passes on each target, and what the kernels of sm_90 take."""
    parts = [
        '## Compiled kernels\n\n`python -m benchmarks kernels` compiles the kernels in bfloat16 and counts instructions. '
        'These are counts, not times. The state has K * V entries per head; a "state update" is the work for one entry and '
        'one token. The kernels run without gate (`z`), skip (`D`) and sigmoid.\n'
    ]
    targets, sizes = (list(dict.fromkeys(row[name] for row in rows)) for name in ('target', 'K'))
    passes = ['forward', 'backward']
    lines = []
    for target in targets:
        for update in ('diagonal', 'exact'):
            for direction in passes:
                cells = []
                for K in sizes:
                    some = [x for x in rows if (x['target'], x['update'], x['pass'], x['K']) == (target, update, direction, K)]
                    costs = [x['instructions_per_state_update'] for x in some]
                    spills = sum(x['spills'] or 0 for x in some)
                    if None in costs:
                        cells.append('compiles' + (f' ({spills} spills)' if spills else ''))
                    else:
                        cells.append(f'{sum(costs):.2f}' + (f' ({spills} spills)' if spills else ''))
                lines.append([target, update, direction, *cells])
    parts.append('Instructions per state update, of all kernels of a pass:\n\n'
                 + table(['target', 'update', 'pass', *(f'K = {K}' for K in sizes)], lines) + '\n')
    names = (
        'kernel', 'update', 'pass', 'registers', 'spills', 'shared_bytes', 'barriers', 'instructions_per_state_update',
        'issue_bound_ms',
    )
    chosen = [[row[name] for name in names] for row in rows if row['target'] == 'sm_90' and row['K'] == 16]
    parts.append('Each kernel on sm_90, K = 16:\n\n' + table([name.replace('_', ' ') for name in names], chosen))
    return '\n'.join(parts)


def traffic(report: dict) -> str:
    """Bytes that a step moves at least, by operator and K."""
    rows = {(row['operator'], row['K']): row for row in report['rows']}
    names, sizes = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    lines = []
    for name in names:
        cells = [f"{rows[name, K]['forward']['bytes']:.1f} + {rows[name, K]['backward']['bytes']:.1f}" for K in sizes]
        lines.append([name, *cells, sum(rows[name, sizes[0]][key]['launches'] for key in ('forward', 'backward'))])
    return (
        '## Bytes moved\n\n`python -m benchmarks traffic` counts the bytes per token and channel that the Triton kernels '
        'read and write at least, as forward + backward: one head, bfloat16, every tensor of a launch counted once, without '
        'gate and skip. "scalar" is one step size per head; the diagonal update is then GLA and the exact one the delta '
        'rule, so fla\'s kernels stand beside them. These are counts, not times.\n\n'
        + table(['operator', *(f'K = {K}' for K in sizes), 'launches'], lines)
    )


def operators(report: dict) -> str:
    """The paper's shapes, and equal state sizes; the other sets are in the picture and the file."""
    parts = [
        f'## Operators on {place(report)}\n\n`python -m benchmarks ops`. {measured_on(report["machine"])} {report["dtype"]}; '
        'times are medians in ms (and quartiles). "of chunk_longhorn" and "of the floor" are multiples of those times. The '
        'floor is what the device needs at least, for the bytes at its copy bandwidth or for the multiply-adds at their '
        'measured rate, whichever is larger. An operator is timed only where its results agree with a float64 reference. '
        '"scalar" is one step size per head.\n'
    ]
    shapes = dict.fromkeys((row['set'], row['shape']) for row in report['rows'] if row['set'] in ('paper', 'equal_state'))
    for name, shape in shapes:
        lines = []
        for row in report['rows']:
            if (row['set'], row['shape']) != (name, shape):
                continue
            forward, both = row.get('forward'), row.get('forward_backward')
            saved = row.get('saved_bytes')
            lines.append([
                row['operator'], row['backend'], row['status'], milliseconds(forward), milliseconds(both),
                f"{both['of_longhorn']:.1f}x" if both else '', f"{both['of_floor']:.1f}x" if both else '',
                f'{saved / 1e6:.1f}' if saved else '',
            ])
        columns = [
            'operator', 'backend', 'status', 'forward', 'forward + backward', 'of chunk_longhorn', 'of the floor', 'saved MB',
        ]
        parts.append(f'{name.replace("_", " ")}: `{shape}`\n\n{table(columns, lines)}\n')
    parts.append('Not run: ' + '; '.join(f'{name}: {reason}' for name, reason in report['not_run'].items()) + '.')
    return '\n'.join(parts)


# names of files, what turns them into text, and a picture
Section = tuple[tuple[str, ...], Callable[..., str], str | None]
SECTIONS: tuple[Section, ...] = (
    (('cpu_ops',), operators, 'cpu_ops'),
    (('cpu_model',), models, 'cpu_model'),
    (('cpu_decode',), models, 'cpu_decode'),
    (('cpu_compiled',), models, None),
    (('kernels',), kernels, None),
    (('traffic',), traffic, None),
    (('predicted', 'predicted_before'), predicted, None),
)


def read(path: Path) -> dict | list:
    return json.loads(path.read_text())


def gpu_sections() -> list[Section]:
    """Sections of what was measured on other devices: `<device>_ops.json`, `<device>_model.json`, `<device>_decode.json`."""
    return [
        ((path.stem,), describe, path.stem if path.with_suffix('.png').exists() else None)
        for kind, describe in (('ops', operators), ('model', models), ('decode', models))
        for path in sorted(RESULTS.glob(f'*_{kind}.json')) if path.stem != f'cpu_{kind}'
    ]


def body(sections: Sequence[Section], results: Path, linked: str) -> str:
    """The sections of a page, from the files in a folder of results; `linked` is where the page finds their pictures."""
    parts = []
    for names, describe, picture in sections:
        paths = [results / f'{name}.json' for name in names]
        if not all(path.exists() for path in paths):
            parts.append(f'## {", ".join(names)}\n\nNot measured.\n')
            continue
        parts.append(describe(*map(read, paths)) + '\n')
        if picture:
            parts.append(f'![{picture}]({linked}/{picture}.png)\n')
    return '\n'.join(parts)


def page() -> str:
    others = gpu_sections()
    return '\n'.join([HEADER if others else HEADER + NO_GPU, body([*others, *SECTIONS], RESULTS, '../benchmarks/results')])


def pages() -> dict[Path, str]:
    return {PAGE: page(), README: replaced(README.read_text(), summary(FIGURES, bool(gpu_sections())))}


def main_of(command: str, pages: Callable[[], dict[Path, str]], args: list[str] | None) -> int:
    """Write the pages that `command` makes or, with `--check`, count those that are not up to date."""
    parser = argparse.ArgumentParser(prog=command, description='Pages from the JSON files of results.')
    parser.add_argument('--check', action='store_true', help='write nothing; fail where a page is not up to date')
    if parser.parse_args(args).check:
        old = [path for path, text in pages().items() if path.read_text() != text]
        for path in old:
            print(f'{path} differs from what the results hold: run {command}', file=sys.stderr)
        return len(old)
    for path, text in pages().items():
        path.write_text(text)
    return 0


def main(args: list[str] | None = None) -> int:
    return main_of('python -m benchmarks report', pages, args)
