"""Machines on which Numba cannot keep machine code, or may not compile: every loop works from its first call."""

import os
import shutil
import subprocess
import sys

import pytest

# two loops, then two others
LOOPS = """
import resource, sys, torch
import fla_longhorn
from fla_cpu import loops
if sys.argv[1] == 'no room':
    # what is written beyond raises OSError, as on a full disk or with a quota
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, 2**12))
for dtype in torch.float32, torch.bfloat16:
    torch.manual_seed(0)
    x, cache = torch.randn(3, 20).to(dtype), torch.randn(3, 20, 4)
    with torch.no_grad():
        y = loops.rms_norm(x, None, 1e-5), loops.convolve_token(x, cache, torch.randn(20, 4), None, True)
    print(*(z.float().norm().item() for z in y))
    if sys.argv[1] == 'room for the first':
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, 2**12))
"""
FAULTS = {
    'empty': ('*.nbi', lambda path: os.truncate(path, 0)),
    'cut': ('*.nbi', lambda path: os.truncate(path, path.stat().st_size // 2)),
    'cut machine code': ('*.nbc', lambda path: os.truncate(path, path.stat().st_size // 2)),
    # as those of another user: this gives an OSError to root too
    'unreadable': ('*.nbi', lambda path: (path.unlink(), path.mkdir())),
}


def run_loops(condition: str, folder) -> tuple[str, int]:
    """What the program printed, and how many times it told of a fault."""
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', LOOPS, condition], capture_output=True, text=True, cwd=folder,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'NUMBA_CACHE_DIR': str(folder / 'cache')},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr.count('fla_cpu: cannot use the machine code in')


@pytest.fixture(scope='module')
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp('filled')
    results, told = run_loops('a cache', folder)
    assert not told and len(list(folder.rglob('*.nbi'))) == 2 and len(list(folder.rglob('*.nbc'))) == 4
    return results, folder


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_of_the_files(fault, filled, tmp_path):
    """The loops are compiled, one line says so, and the files stay as they are."""
    results, folder = filled
    shutil.copytree(folder / 'cache', tmp_path / 'cache')
    pattern, spoil = FAULTS[fault]
    for path in list(tmp_path.rglob(pattern)):
        spoil(path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.nb?')}
    assert run_loops(fault, tmp_path) == (results, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*.nb?')} == before
