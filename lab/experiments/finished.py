"""`results.json`, the finished runs of a folder: several processes may train into one folder, each another run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from benchmarks.measure.machine import describe_machine


def read(results: Path) -> dict:
    return json.loads(results.read_text()) if results.exists() else {'runs': []}


def add(results: Path, setting: dict, run: dict, part: str = 'runs') -> None:
    """Append a run, and the machine that it ran on, to what the file holds by now."""
    with FileLock(results.with_suffix('.lock')):
        report, machine = read(results), describe_machine()
        # older files have one for all
        for old in (*report['runs'], *report.get('search', ())):
            old.setdefault('machine', report.get('machine'))
        report.setdefault(part, []).append(run | {'machine': machine})
        temporary = results.with_suffix('.tmp')
        temporary.write_text(json.dumps(report | {'setting': setting, 'machine': machine}, indent=1) + '\n')
        os.replace(temporary, results)


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Whether this process has the folder to itself meanwhile; another process's end, by a signal too, sets it free."""
    lock = FileLock(folder.with_suffix('.lock'), blocking=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
