"""A copy of the package and its tests, to be changed and tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from tests.mutate.mutation import ROOT, Mutation

COPIED = ('fla_cpu', 'fla_longhorn', 'fla_longhorn_vllm.py', 'offgpu', 'tests', 'configs', 'docs', 'pyproject.toml')
# seconds for the tests of one mutation
LIMIT = 300
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
        self.folder, self.machine_code = folder, folder / 'numba'
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(ROOT / name, folder / name)

    def pytest(self, mutation: Mutation, machine_code: Path | None = None) -> tuple[int, str]:
        """Exit code of the mutation's tests, -1 where they take longer than `LIMIT` seconds, and what they write."""
        env = {
            **os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(self.folder), 'PYTHONDONTWRITEBYTECODE': '1',
            'TRITON_INTERPRET': '0', **mutation.env, 'NUMBA_CACHE_DIR': str(machine_code or self.machine_code),
        }
        command = [sys.executable, '-c', PYTEST, '-qx', '-p', 'no:cacheprovider', *mutation.selection]
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
        compiled = mutation.file.startswith(('ops/numba/', 'fla_cpu/'))
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
