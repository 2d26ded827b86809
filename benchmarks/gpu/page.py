"""The page of a run: the first error; what failed, by name; predictions beside measurements; what was not reached."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report.tables import table

RESULTS = Path(__file__).parents[1] / 'results'
# lines of an error on the page; results.jsonl has it whole
ERROR_LINES = 12
# stages of which what failed is enough
UNLISTED = ('smoke', 'tests', 'more_tests')


def make(records: list[dict], stages: list[tuple[str, str]]) -> str:
    """Markdown of all records of a folder; `stages` are names and what they are."""
    by_stage: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        if 'stage' in record:
            by_stage[record['stage']].append(record)
    machines = [record['machine'] for record in records if 'machine' in record]
    parts = [first_error(records), '# A run on a GPU', about(machines[-1] if machines else {}, len(machines))]
    parts += [overview(by_stage, stages), *failures(by_stage), *refused(by_stage)]
    for name, what in stages:
        rows = [record for record in by_stage[name] if record.get('rows') and name not in UNLISTED]
        if rows:
            parts += [f'## {name}: {what}', *(times(rows) if name == 'passes' else [plain(rows)])]
    return '\n\n'.join(parts) + '\n'


def first_error(records: list[dict]) -> str:
    for record in records:
        if 'error' in record:
            last = ' / '.join([line.strip() for line in record['error'].splitlines() if line.strip()][-2:])
            return f'First error: {record["stage"]}: {record.get("item", "a process that did not start")}: {last[:400]}'
    return 'No error.'


def about(machine: dict, calls: int) -> str:
    versions = ', '.join(f'{name} {x}' for name, x in machine.get('versions', {}).items() if x)
    of = f'commit {machine.get("commit")}, kernels {machine.get("kernels")}'
    return f'{machine.get("device")}; Python {machine.get("python")}, {versions}; {of}; calls: {calls}.'


def overview(by_stage: dict[str, list[dict]], stages: list[tuple[str, str]]) -> str:
    """A line for each stage: items that ended, that failed, kernels compiled, seconds of its part, was all reached."""
    lines = []
    for name, _ in stages:
        items = [record for record in by_stage[name] if 'item' in record]
        turns = [record for record in by_stage[name] if 'finished' in record]
        compiled = sum(len(record.get('compiled', [])) for record in items)
        reached = 'all' if any(turn['finished'] for turn in turns) else 'in part' if items else 'not reached'
        failed = sum('error' in record for record in by_stage[name])
        cut = {item for record in by_stage[name] for item in record.get('cut', [])} - {record['item'] for record in items}
        seconds, part = (sum(turn[x] for turn in turns) for x in ('seconds', 'part'))
        named = ', '.join(sorted(cut)) if len(cut) < 4 else f'{len(cut)} items'
        lines.append([name, reached, len(items), failed, compiled, f'{seconds:.0f}', f'{part:.0f}', named])
    return table(['stage', 'reached', 'items', 'failed', 'kernels compiled', 'seconds', 'of', 'cut by the time'], lines)


def failures(by_stage: dict[str, list[dict]]) -> Iterator[str]:
    failed = [(name, record) for name, some in by_stage.items() for record in some if 'error' in record]
    yield f'## What failed: {len(failed) or "nothing"}'
    for name, record in failed:
        error = record['error'].strip().splitlines()[-ERROR_LINES:]
        yield f'**{name}: {record.get("item", "a process that did not start")}**\n\n```\n' + '\n'.join(error) + '\n```'


def refused(by_stage: dict[str, list[dict]]) -> Iterator[str]:
    records = [record for some in by_stage.values() for record in some if 'rows' in record]
    rows = [(f'{record["stage"]}: {record["item"]}', row) for record in records for row in record['rows']]
    if lines := [f'- {name}: {row["refused by fla"]}' for name, row in rows if 'refused by fla' in row]:
        yield '## Refused by fla\n\n' + '\n'.join(lines)


def times(records: list[dict]) -> Iterator[str]:
    """The passes, by kernels beside the prediction for the card that ran or, without one, for the first in the file."""
    predicted = {(row['gpu'], row['pass'], row['K'], row['B'], row['T']): row for row in load('predicted')}
    lines = []
    for record in records:
        name, K, shape = record['item'].rsplit(', ', 2)
        B, T, _ = map(int, shape.split(' x '))
        operator, _, gate = name.partition(', gate per ')
        for row in (row for row in record['rows'] if 'refused by fla' not in row):
            key = f'{operator}_{gate}_gate_{row["pass"]}' if gate else f'{operator}_{row["pass"]}'
            known = [p for p in predicted if p[1:] == (key, int(K.removeprefix('K = ')), B, T)]
            forecast = next((predicted[p]['ms'] for gpu in ('H200', 'H100') for p in known if p[0] == gpu), None)
            kernels = row.get('kernels_ms') or row.get('graph_ms') or row.get('ms')
            lines.append([
                name, K, shape, row['pass'], *(number(row.get(x)) for x in ('kernels_ms', 'ms', 'graph_ms')), number(forecast),
                number(kernels / forecast if kernels and forecast else None),
            ])
    yield 'Milliseconds: the kernels alone, eager calls, calls in a CUDA graph; the last column is measured over predicted.'
    yield table(['call', 'K', 'shape', 'pass', 'kernels', 'eager', 'graph', 'predicted', 'ratio'], lines)


def load(name: str) -> list[dict]:
    path = RESULTS / f'{name}.json'
    return [row for row in json.loads(path.read_text())['rows'] if 'ms' in row] if path.exists() else []


def plain(records: list[dict]) -> str:
    """Rows as they are, with the columns that any of them has."""
    rows = [{'item': record['item'], **row} for record in records for row in record['rows']]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return table(columns, [[shown(row.get(name)) for name in columns] for row in rows])


def shown(x: object) -> str:
    return number(x) if isinstance(x, float) else '' if x is None else str(x)


def number(x: float | None) -> str:
    return '' if x is None else f'{x:.3g}' if abs(x) < 100 else f'{x:.0f}'
