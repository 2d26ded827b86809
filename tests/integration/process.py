"""Programs in processes of their own: without network, with a cache of their own, one thread."""

from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / 'scripts'


def run(*args: object, cwd: Path, status: int = 0) -> str:
    """Run `python *args` in `cwd`; its stdout, with an assertion on the exit status that shows stderr."""
    done = forks.run(*args, cwd=cwd, env={'HF_HOME': str(cwd / 'hf')})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout
