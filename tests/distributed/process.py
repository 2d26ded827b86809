"""Programs of several ranks, started in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]


def run(*args: object, interpret: bool = False, cwd: Path = ROOT) -> str:
    """Run `python *args` with one thread a rank; its stdout, and stderr where it fails."""
    if interpret:
        # Triton and fla ask when they are imported
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'TRITON_INTERPRET': '1'}
        done = subprocess.run(
            [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600,
        )
    else:
        done = forks.run(*args, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
