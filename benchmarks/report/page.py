"""`results.md` and `cards.md` of the notebook, from the JSON files in `benchmarks/results/`.

    python -m benchmarks report [--check]

`--check` writes nothing, and fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.report.cards import cards_page
from benchmarks.report.memory import memory
from benchmarks.report.models import generation, models
from benchmarks.report.predicted import calibrated, passes, predicted
from benchmarks.report.serving import arrivals, serving_parts
from benchmarks.report.tables import measured_on, milliseconds, place, table

ROOT = Path(__file__).parents[2]
RESULTS, NOTEBOOK = ROOT / 'benchmarks' / 'results', ROOT / 'lab' / 'notebook'
PAGE, CARDS = NOTEBOOK / 'results.md', NOTEBOOK / 'cards.md'
HEADER = """# Results

`python -m benchmarks report` writes this page from the files in [`benchmarks/results`](../../benchmarks/results). They
hold much more: all shapes, dtypes and batches, quartiles, instruction counts, and what was left out and why. What is not in
them was not measured.
"""
NO_GPU = '\n**On a GPU a few passes of the kernels have been timed, no whole model.**\n'
# channels of the paper's 120M layer
WIDTH = 1536


def operators(report: dict) -> str:
    """One shape, one step size per channel; the other shapes are in the picture and the file."""
    rows = [row for row in report['rows'] if (row['set'], row['V'], row['status']) == ('paper', WIDTH, 'ok')]
    lines = [
        [f'`{row["operator"]}`', row['backend'], milliseconds(row['forward']), milliseconds(row['forward_backward']),
         f'{row["forward_backward"]["of_longhorn"]:.1f}x']
        for row in rows if row['shape'] == rows[0]['shape'] and not row['operator'].endswith('scalar')
    ]
    columns = ['operator', 'backend', 'forward, ms', 'forward + backward, ms', 'of chunk_longhorn']
    shape = f'`{rows[0]["shape"]}`' if rows else ''
    return (
        f'## Operators on {place(report)}\n\n`python -m benchmarks ops`. {measured_on(report["machine"])} {report["dtype"]}, '
        f"the paper's 120M width ({shape}); medians (and quartiles). An operator is timed only where its results agree with "
        'a float64 reference.\n\n' + table(columns, lines)
    )



# names of files, the function that makes their text, and a picture
Section = tuple[tuple[str, ...], Callable[..., str], str | None]
SECTIONS: tuple[Section, ...] = (
    (('cpu_ops',), operators, 'cpu_ops'),
    (('cpu_model',), models, 'cpu_model'),
    (('cpu_decode',), generation, None),
    (('cpu_gate',), partial(models, title='Longhorn with a gate'), None),
    (('cpu_columns',), partial(models, title='Weights by rows and by columns'), None),
    (('arrivals',), arrivals, None),
    (('serving_parts',), serving_parts, None),
    (('memory',), memory, None),
    (('h200_passes',), passes, None),
    (('predicted',), predicted, None),
    (('calibration', 'h200_passes'), calibrated, None),
)


def read(path: Path) -> dict | list:
    return json.loads(path.read_text())


def gpu_sections() -> list[Section]:
    """Sections for other devices: `<device>_ops.json`, `<device>_model.json`, `<device>_decode.json`."""
    return [
        ((path.stem,), describe, path.stem if path.with_suffix('.png').exists() else None)
        for kind, describe in (('ops', operators), ('model', models), ('decode', models))
        for path in sorted(RESULTS.glob(f'*_{kind}.json')) if path.stem != f'cpu_{kind}'
    ]


def body(sections: Sequence[Section], results: Path, linked: str) -> str:
    """The sections of a page, from the files in the folder `results`; the page finds their pictures in `linked`."""
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
    return '\n'.join([HEADER if others else HEADER + NO_GPU, body([*others, *SECTIONS], RESULTS, '../../benchmarks/results')])


def pages() -> dict[Path, str]:
    cards = cards_page(json.loads((RESULTS / 'kernels.json').read_text()))
    return {PAGE: page(), CARDS: cards}


def main_of(command: str, pages: Callable[[], dict[Path, str]], args: list[str] | None) -> int:
    """Write the pages of `command` or, with `--check`, count those that are out of date."""
    parser = argparse.ArgumentParser(prog=command, description='Write pages from the JSON files of results.')
    parser.add_argument('--check', action='store_true', help='write nothing; fail if a page is out of date')
    if parser.parse_args(args).check:
        old = [path for path, text in pages().items() if path.read_text() != text]
        for path in old:
            print(f'{path} differs from the results: run {command}', file=sys.stderr)
        return len(old)
    for path, text in pages().items():
        path.write_text(text)
    return 0


def main(args: list[str] | None = None) -> int:
    return main_of('python -m benchmarks report', pages, args)
