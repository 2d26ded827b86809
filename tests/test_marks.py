"""The mark `slow`: what `make test` leaves out runs in CI and wherever pytest is called plainly."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(target: str) -> list[list[str]]:
    """What `make` would run, in words."""
    done = subprocess.run(['make', '--dry-run', '-o', 'setup', target], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines() if 'pytest' in line]


def test_make_test_leaves_out_what_is_slow_and_nothing_else():
    left_out, runs, everything = ['-m', "'not", "slow'"], commands('test'), commands('test-all')
    assert len(runs) == len(everything) == 2
    for some, every in zip(runs, everything, strict=True):
        assert not set(left_out) & set(every[every.index('pytest'):])
        at = some.index("'not") - 1
        assert some[at:at + 3] == left_out and some[:at] + some[at + 3:] == every


def test_ci_runs_everything():
    assert 'make test-all' in (ROOT / '.ci' / 'run').read_text().splitlines()


def test_marks_are_registered(pytestconfig):
    """A plain `pytest` chooses nothing, and a misspelt mark is an error."""
    assert '--strict-markers' in pytestconfig.getini('addopts') and '-m' not in pytestconfig.getini('addopts')
    assert any(line.startswith('slow:') for line in pytestconfig.getini('markers'))
