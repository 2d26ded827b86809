"""Times measured on a GPU beside those predicted now, in one table, and what pages say of them.

    python -m benchmarks measured [DIR]

With DIR, the folder of `python -m benchmarks gpu`, its passes become a file of `benchmarks/results` first. Then the table of
`lab/notebook/results.md` is written anew, and what pages say of times that are no longer so is named by line. Predictions are
those of `benchmarks/results/predicted.json` (`python -m benchmarks predict --pages`).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.gpu.results import Results
from benchmarks.measure.machine import KERNELS, ROOT, digest_of_kernels, git
from benchmarks.measure.timing import write_report
from benchmarks.report.tables import table

RESULTS = ROOT / 'benchmarks' / 'results'
NOTEBOOK = ROOT / 'lab' / 'notebook' / 'results.md'
PAGES = (ROOT / 'README.md', NOTEBOOK, *sorted((ROOT / 'docs').glob('*.md')))
COLUMNS = [
    'pass', 'K', 'B x T x V', 'eager, ms (quartiles)', 'kernels alone, ms', 'card', 'torch, Triton', 'commit, day',
    'of kernels of now', 'predicted for what ran, ms', 'predicted now, ms',
]
SHAPE = (8, 2048, 4096)
OLDER = 'measured on older kernels'


@cache
def predicted() -> dict[tuple[str, int], dict]:
    """By pass and K, at `SHAPE` on an H200."""
    rows = json.loads((RESULTS / 'predicted.json').read_text())['rows']
    return {(row['pass'], row['K']): row for row in rows if (row['B'], row['T'], row['V']) == SHAPE}


@cache
def measured() -> list[dict]:
    """Rows with what is of their files: card, versions, commit, day; `now`: are its kernels those of this checkout?"""
    rows = []
    for path in (RESULTS / 'h200_passes.json', *sorted(RESULTS.glob('gpu_*.json'))):
        report = json.loads(path.read_text())
        machine = report['machine']
        about = {
            'card': machine['device'], 'versions': f'{machine["versions"]["torch"]}, {machine["versions"]["triton"]}',
            'commit': f'{machine["commit"]}, {report["day"]}', 'now': machine['kernels'] == digest_of_kernels(),
        }
        rows += [row | about for row in report['rows']]
    return rows


def of_fla(row: dict) -> bool:
    return not row['pass'].startswith(('exact', 'diagonal'))


def make_table() -> str:
    lines = []
    for row in measured():
        quartiles = f' ({row["ms_low"]:.2f} to {row["ms_high"]:.2f})' if 'ms_low' in row else ''
        eager = f'{row["ms"]:.2f}{quartiles}{", launch-bound" * (row.get("group") == "host")}' if 'ms' in row else ''
        forecast = predicted().get((row['pass'], row['K']), {}) if (row['B'], row['T'], row['V']) == SHAPE else {}
        lines.append([
            row['pass'], row['K'], f'{row["B"]} x {row["T"]} x {row["V"]}', eager, two(row.get('kernels_ms')), row['card'],
            row['versions'], row['commit'], "fla's" if of_fla(row) else 'yes' if row['now'] else 'no',
            two(row.get('predicted_ms')), f'{forecast["ms"]:.2f} within {forecast["within"]:.0%}' if forecast else '',
        ])
    return table(COLUMNS, lines)


def two(x: float | None) -> str:
    return '' if x is None else f'{x:.2f}'


def totals(rows: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """Forward and backward together, by operator and K."""
    return {
        (name[:-4], K): ms + rows[name[:-4] + '_bwd', K]
        for (name, K), ms in rows.items() if name.endswith('_fwd') and (name[:-4] + '_bwd', K) in rows
    }


def forecasts() -> dict[tuple[str, int], float]:
    return totals({key: row['ms'] for key, row in predicted().items()})


def timings(now: bool) -> dict[tuple[str, int], float]:
    """Of Longhorn's operators at `SHAPE`, by kernels of now or by older ones."""
    rows = [row for row in measured() if row['now'] == now and not of_fla(row) and (row['B'], row['T'], row['V']) == SHAPE]
    return totals({(row['pass'], row['K']): row.get('kernels_ms', row.get('ms')) for row in rows})


def ratios() -> dict[str, str]:
    """What pages may say as `N times as long`, and of what that is."""
    times = forecasts()
    pairs = {(a, b) for a in times for b in times if a[1] == b[1] or a[0] == b[0]}
    return {f'{times[a] / times[b]:.1f}': f'{a} over {b}' for a, b in pairs if times[a] > times[b]}


def units(text: str) -> Iterator[str]:
    """Rows of tables, and paragraphs in one line."""
    for paragraph in re.split(r'\n\s*\n|\n(?=[-#|] ?)', text):
        yield ' '.join(paragraph.split())


def problems(text: str) -> list[str]:
    """What a page says of times on a GPU that is not so, or no longer."""
    old, new, known, found = timings(False), timings(True), forecasts(), []
    for unit in units(text.replace(make_table(), '')):
        said = re.findall(rf'(\d+\.\d+) ms (predicted|{OLDER}|measured)', unit)
        bare = {value for value in re.findall(r'(\d+\.\d+)(?: and \d+\.\d+)? ms', unit) if (value not in dict(said))}
        for key, ms in old.items():
            forecast = f'{known[key]:.2f}'
            cited = (two(ms), OLDER) in said
            if two(ms) in bare or cited and (forecast, 'predicted') not in said:
                found.append(f'{two(ms)} ms of {key} is by older kernels: say "{OLDER}", and "{forecast} ms predicted"')
        for value, what in said:
            wanted = {'predicted': known, OLDER: old, 'measured': new}[what]
            if value not in map(two, wanted.values()):
                found.append(f'{value} ms {what}: known are {({key: two(ms) for key, ms in wanted.items()})}')
        if re.search(r'H200|GPU|predicted', unit):
            times = re.findall(r'(\d+\.\d) times as long', unit)
            found += [f'{x} times as long: known are {ratios()}' for x in times if x not in ratios() and 'CPU' not in unit]
        found = [x if ': in ' in x else f'{x}: in "{unit[:100]}"' for x in found]
    return found


def add(folder: Path) -> Path:
    """The passes of a run as a file of `benchmarks/results`, by day; its commit is that of this checkout if kernels are.

    ValueError: no pass was timed.
    """
    records = Results(folder).records
    call = [record for record in records if 'machine' in record][-1]
    machine, day = call['machine'], call['day']
    if machine['commit'] is None and machine['kernels'] == digest_of_kernels() and not git('status', '--porcelain', KERNELS):
        machine = machine | {'commit': git('rev-parse', '--short', 'HEAD').strip()}
    rows = []
    for record in records:
        # an item that hung has no rows
        if record.get('stage') == 'passes' and 'rows' in record:
            operator, K, shape = record['item'].rsplit(', ', 2)
            name, _, gate = operator.partition(', gate per ')
            sizes = dict(zip('BTV', map(int, shape.split(' x ')), strict=True))
            sizes['K'] = int(K.removeprefix('K = '))
            rows += [
                sizes | row | {'pass': f'{name}{f"_{gate}_gate" * bool(gate)}_{row["pass"]}'}
                for row in record['rows'] if 'refused by fla' not in row
            ]
    if not rows:
        raise ValueError(f'DIR must have the results of a run that timed passes, got {folder}')
    path = RESULTS / f'gpu_{day}.json'
    write_report({'machine': machine, 'day': day, 'rows': rows}, path)
    return path


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks measured', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('folder', type=Path, nargs='?', metavar='DIR', help='what `python -m benchmarks gpu` wrote')
    options = parser.parse_args(args)
    if options.folder:
        print(add(options.folder))
    text = NOTEBOOK.read_text()
    start = text.index(table(COLUMNS, []))
    NOTEBOOK.write_text(text[:start] + make_table() + text[text.index('\n\n', start):])
    found = [f'{path.relative_to(ROOT)}: {x}' for path in PAGES for x in problems(path.read_text())]
    print('\n'.join(found) or 'the pages say what is so')
    return int(bool(found))
