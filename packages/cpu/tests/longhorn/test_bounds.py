"""No index of the compiled loops leaves its array."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
CASES = (
    'numba and (chunk and (test_shapes or test_any or test_flags or test_packed or test_outputs) or test_pool_equals '
    'or test_in_place or test_states_in_place or test_equals_the_recurrence or test_rows_of)'
)


@pytest.mark.slow
def test_operators_with_every_index_checked(tmp_path):
    """In a process of their own: Numba compiles with bounds checks or without, for all its functions."""
    files = [f'tests/ops/test_{name}.py' for name in ('longhorn', 'pool', 'state_update', 'gate')]
    files.append('packages/cpu/tests/longhorn/test_mixer.py')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-k', CASES, *files], cwd=ROOT,
        env=os.environ | {'NUMBA_BOUNDSCHECK': '1', 'NUMBA_CACHE_DIR': str(tmp_path)}, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
