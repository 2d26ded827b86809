"""The fast calls and the emulator's own kernels with several versions of Triton, each installed into a folder.

    python -m tests.ptx.versions 3.6.0 3.9.0 [--folder build/triton] [--groups fast]

Triton alone changes: the folder comes first on the path of a process that else has this one's packages. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]

# where a kernel has an autotuner, as in fla, Triton 3.3 asks the driver for one thing when it is imported
START = """
import runpy, sys, types
from triton.runtime.driver import driver
if not hasattr(type(driver), 'active'):
    driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: None))
sys.argv[0] = 'tests.ptx'
runpy.run_module('tests.ptx', run_name='__main__')
"""


def install(version: str, folder: Path) -> Path:
    """Triton of this version in a folder of its own, from pip where it is not there yet."""
    place = folder / version
    if not (place / 'triton').is_dir():
        command = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', str(place), f'triton=={version}']
        subprocess.run(command, check=True)
    return place


def run(version: str, folder: Path, *args: str) -> subprocess.CompletedProcess:
    """`python -m tests.ptx` with this version."""
    env = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'} | {
        'PYTHONPATH': f'{install(version, folder)}:{ROOT}', 'TRITON_CACHE_DIR': str(folder / 'cache' / version),
    }
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', START, *args], cwd=ROOT, env=env, capture_output=True, text=True,
        check=False,
    )


@dataclass
class Outcome:
    """What came of one version: rows of the calls, lines of the emulator's own kernels that went wrong."""

    version: str
    rows: list[dict]
    selftest: list[str]
    error: str = ''

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row['ok'] for row in self.rows) and not self.selftest and not self.error

    def cells(self) -> list[str]:
        right = sum(row['ok'] for row in self.rows)
        wrong = [row.get('failed') or f'{row["case"]}: {kinds(row)}' for row in self.rows if not row['ok']]
        seconds = {kernel: s for row in self.rows for kernel, s in row['compiled']}
        slowest = max(seconds, key=lambda kernel: seconds[kernel], default='')
        return [
            self.version, f'{right} of {len(self.rows)}', '\n'.join([*wrong, *self.selftest, self.error]).strip(),
            f'{slowest} {seconds[slowest]}s' if slowest else '',
        ]


def kinds(row: dict) -> str:
    """What is wrong with a row, in short."""
    return ', '.join([*row['over'], *sorted({f'{x["kind"]} ({x["kernel"]} {x["line"]})' for x in row['findings']})])


def try_version(version: str, folder: Path, groups: list[str]) -> Outcome:
    path = folder / f'{version}.json'
    path.unlink(missing_ok=True)
    selftest = run(version, folder, '--selftest')
    calls = run(version, folder, '--groups', *groups, '--assemble', '--json', str(path))
    rows = json.loads(path.read_text(encoding='utf-8')) if path.exists() else []
    wrong = [line for line in selftest.stdout.splitlines() if line.startswith('FAIL')]
    return Outcome(version, rows, wrong, '' if selftest.stdout and rows else (selftest.stderr + calls.stderr)[-1000:])


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m tests.ptx.versions', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('versions', nargs='+', help='of Triton')
    parser.add_argument('--folder', type=Path, default=ROOT / 'build' / 'triton', help='where they are installed')
    parser.add_argument('--groups', nargs='+', default=['fast'], help='calls of `tests/ptx/calls.py`')
    options = parser.parse_args()
    table = Table('triton', 'calls right', 'wrong', 'slowest to compile, CPU')
    outcomes = []
    for version in options.versions:
        outcomes.append(try_version(version, options.folder.resolve(), options.groups))
        table.add_row(*outcomes[-1].cells())
        Console(width=180).print(table)
    return int(not all(outcome.ok for outcome in outcomes))


if __name__ == '__main__':
    raise SystemExit(main())
