"""No index of the compiled loops leaves its array."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_random_calls(tmp_path):
    """In a process of its own: Numba compiles with bounds checks or without, for all its functions."""
    environment = {
        **os.environ, 'NUMBA_BOUNDSCHECK': '1', 'NUMBA_CACHE_DIR': str(tmp_path), 'FLA_LONGHORN_BACKEND': 'numba',
    }
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'tests.ops.numba.bounds'], cwd=ROOT, env=environment, capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f'{done.stdout.splitlines()[-1]}\n{done.stderr}'
