"""Apply each mutation to a copy of the package and say which ones the tests do not notice."""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tests.mutate.mutation import ROOT, Mutation
from tests.mutate.rooms import MUTATIONS, ROOMS

COPIED = (
    'fla_longhorn', 'packages', 'tests', 'benchmarks', 'examples', 'docs', 'conftest.py', 'pyproject.toml',
)
# seconds for the tests of one mutation
LIMIT = 300


class Copy:
    """A copy in `folder`; one thread at a time works on it."""

    def __init__(self, folder: Path):
        self.folder, self.machine_code = folder, folder / 'numba'
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(ROOT / name, folder / name)

    def pytest(self, mutation: Mutation, machine_code: Path | None = None) -> tuple[int, str]:
        """Exit code of the mutation's tests, -1 where they take longer than `LIMIT` seconds, and what they write."""
        # and folders of packages beside those of the environment
        own = self.folder, *sorted((self.folder / 'packages').iterdir())
        paths = [*map(str, own), *(os.path.abspath(x) for x in os.environ.get('PYTHONPATH', '').split(os.pathsep) if x)]
        env = {
            **os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(paths), 'PYTHONDONTWRITEBYTECODE': '1',
            'TRITON_INTERPRET': '0', **mutation.env, 'NUMBA_CACHE_DIR': str(machine_code or self.machine_code),
        }
        command = [sys.executable, '-m', 'pytest', '-qx', '-p', 'no:cacheprovider', *mutation.selection]
        try:
            done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired as late:
            return -1, str(late)
        return done.returncode, done.stdout + done.stderr

    @contextmanager
    def mutated(self, mutation: Mutation):
        """The copy with the mutation in it; yields where Numba keeps machine code meanwhile."""
        path = self.folder / mutation.path
        text, stamp = path.read_text(encoding='utf-8'), path.stat()
        # Numba looks at the file of the loop that is called, not at those of the functions in it
        compiled = mutation.file.startswith('packages/cpu/')
        machine_code = Path(tempfile.mkdtemp(dir=self.folder)) if compiled else self.machine_code
        path.write_text(mutation.apply(text), encoding='utf-8')
        try:
            yield machine_code
        finally:
            path.write_text(text, encoding='utf-8')
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            if compiled:
                shutil.rmtree(machine_code)

    def run(self, mutation: Mutation) -> tuple[str, str]:
        """`killed`, `survived` or `error` (the tests end otherwise, or fail anyway), and what pytest wrote."""
        with self.mutated(mutation) as machine_code:
            code, output = self.pytest(mutation, machine_code)
        if code != 1:
            return 'survived' if code == 0 else 'error', f'{output}\npytest ended with code {code}'
        code, output = self.pytest(mutation)
        return 'error' if code else 'killed', f'{output}\nthe tests fail without the mutation too'


def check_fit(mutations: dict[str, Mutation]) -> None:
    """Raise an error if a mutation quotes what is not in its file, makes no Python of it, or has the name of another one."""
    if len(MUTATIONS) != sum(map(len, ROOMS.values())):
        raise ValueError('two mutations of a room have the same name')
    for mutation in mutations.values():
        path = ROOT / mutation.path
        compile(mutation.apply(path.read_text(encoding='utf-8')), path, 'exec')


def run(mutations: dict[str, Mutation], workers: int) -> Counter[str]:
    """How many mutations were killed, survived or ended in an error; a line for each."""
    check_fit(mutations)
    copies: queue.Queue[Copy] = queue.Queue()

    def run_one(name: str) -> tuple[str, str, str, float]:
        copy, begin = copies.get(), time.perf_counter()
        try:
            return name, *copy.run(mutations[name]), time.perf_counter() - begin
        finally:
            copies.put(copy)

    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix='mutate-') as folder:
        for i in range(workers):
            copies.put(Copy(Path(folder).resolve() / str(i)))
        with ThreadPoolExecutor(workers) as pool:
            for done in as_completed([pool.submit(run_one, name) for name in mutations]):
                name, result, output, seconds = done.result()
                results[result] += 1
                print(f'{name}: {result} in {seconds:.0f} s', flush=True)
                if result != 'killed':
                    print(output[-3000:])
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m tests.mutate', description=__doc__)
    parser.add_argument('--workers', type=int, default=2, help='mutations that run at a time')
    parser.add_argument('--only', nargs='+', metavar='ROOM[/NAME]', help='these rooms or mutations alone')
    parser.add_argument('--list', action='store_true', help='print the mutations and run none')
    options = parser.parse_args(arguments)
    chosen = {
        name: mutation for name, mutation in MUTATIONS.items()
        if options.only is None or any(f'{name}/'.startswith(f'{only}/') for only in options.only)
    }
    if not chosen:
        parser.error(f'--only must name rooms or mutations, got {options.only}; --list prints them')
    if options.list:
        for name, mutation in chosen.items():
            print(f'{name}: {mutation.breaks}\n    {mutation.tests}')
        return 0
    results = run(chosen, options.workers)
    print(', '.join(f'{results[kind]} {kind}' for kind in ('killed', 'survived', 'error')), f'of {len(chosen)}')
    return 0 if results['killed'] == len(chosen) else 1


if __name__ == '__main__':
    raise SystemExit(main())
