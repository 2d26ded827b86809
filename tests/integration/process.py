"""Programs in processes of their own: without network, with a cache of their own, one thread."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / 'scripts'


def run(*args: object, cwd: Path, status: int = 0) -> str:
    """Run `python *args` in `cwd`; its stdout, with an assertion on the exit status that shows stderr."""
    env = {
        **os.environ, 'HF_HOME': str(cwd / 'hf'), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT),
    }
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout
