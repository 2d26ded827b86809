"""A copy of the package and its tests, to be changed and tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.mutate.mutation import ROOT, Mutation

COPIED = ('fla_cpu', 'fla_longhorn', 'fla_longhorn_vllm.py', 'offgpu', 'tests', 'configs', 'docs', 'pyproject.toml')
# seconds for the tests of one mutation
LIMIT = 300
# pytest's exit codes: tests failed; it was interrupted, for instance by an import that failed
FAILED, INTERRUPTED = 1, 2
# of the copy, or a code that is no result of tests
PYTEST = '''
import importlib.util, os, sys
found = importlib.util.find_spec('fla_longhorn').origin
if found != os.path.join(os.getcwd(), 'fla_longhorn', '__init__.py'):
    print(f'tests would import {found} instead of the copy in {os.getcwd()}')
    sys.exit(125)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
'''


class Copy:
    """A copy in `folder`; one thread at a time works on it."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(ROOT / name, folder / name)
        self.machine_code = folder / 'numba'

    def pytest(
        self, *arguments: str, env: Mapping[str, str], machine_code: Path | None = None, limit: float = LIMIT,
    ) -> tuple[int, str]:
        """pytest's exit code, -1 where it took longer than `limit` seconds, and what it wrote."""
        environment = {
            **os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(self.folder), 'PYTHONDONTWRITEBYTECODE': '1',
            'TRITON_INTERPRET': '0', **env, 'NUMBA_CACHE_DIR': str(machine_code or self.machine_code),
        }
        command = [sys.executable, '-c', PYTEST, '-q', '-p', 'no:cacheprovider', *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=limit,
            )
        except subprocess.TimeoutExpired as late:
            return -1, str(late)
        return done.returncode, done.stdout + done.stderr

    @contextmanager
    def mutated(self, mutation: Mutation):
        """The copy with the mutation in it; yields where Numba keeps machine code meanwhile."""
        path = self.folder / mutation.path
        text, stamp = path.read_text(encoding='utf-8'), path.stat()
        # Numba looks at the file of the loop that is called, not at those of the functions in it
        machine_code = self.machine_code
        if mutation.file.startswith(('ops/numba/', 'fla_cpu/')):
            machine_code = Path(tempfile.mkdtemp(dir=self.folder))
        path.write_text(mutation.apply(text), encoding='utf-8')
        try:
            yield machine_code
        finally:
            path.write_text(text, encoding='utf-8')
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            if machine_code != self.machine_code:
                shutil.rmtree(machine_code)

    def run(self, mutation: Mutation, cases: list[str]) -> tuple[str, str]:
        """`killed`, `survived` or `error` (the mutation's own), and what pytest wrote."""
        with self.mutated(mutation) as machine_code:
            code, output = self.pytest('-x', *cases, env=mutation.env, machine_code=machine_code)
        if code == 0:
            return 'survived', output
        if code == (FAILED if mutation.collects else INTERRUPTED):
            return 'killed', output
        reason = f'the tests take more than {LIMIT} seconds' if code == -1 else f'pytest ended with code {code}'
        return 'error', f'{output}\n{reason}'
