"""Forked programs see what programs started afresh see, but for what is imported already."""

import os

import pytest

from tests import forks

SEEN = '''
import os, sys
print(__name__, sys.modules['__main__'].__name__, sys.argv[1:], os.getcwd(), os.environ['SEEN'], repr(sys.path[0]))
print(sys.stdin.read(), sorted({'fla', 'torch', 'fla_longhorn', 'numba'} & set(sys.modules)))
'''


@pytest.mark.parametrize('how', ['-c', '-m', 'script'])
def test_what_a_program_sees(how, tmp_path):
    (tmp_path / 'seen.py').write_text(SEEN)
    program = {'-c': ('-c', SEEN), '-m': ('-m', 'seen'), 'script': ('seen.py',)}[how]
    done = forks.run(*program, 'a', '--b', cwd=tmp_path, env={'SEEN': 'yes'})
    assert done.returncode == 0 and done.stderr == ''
    path = '' if how == '-c' else str(tmp_path)
    assert done.stdout.splitlines() == [
        f"__main__ __main__ ['a', '--b'] {tmp_path} yes {path!r}", " ['fla', 'torch']",
    ]


def test_one_leaves_nothing_to_the_next():
    code = 'import os, sys; assert not hasattr(sys, "left") and "LEFT" not in os.environ; sys.left = os.environ["LEFT"] = "x"'
    for _ in range(2):
        assert forks.run('-c', code).returncode == 0
    assert 'LEFT' not in os.environ


@pytest.mark.parametrize(('code', 'status', 'errors'), [
    ('raise ValueError("wrong")', 1, 'ValueError: wrong\n'), ('import sys; sys.exit(7)', 7, ''),
    ('import sys; sys.exit("message")', 1, 'message\n'), ('import os; os.kill(os.getpid(), 9)', -9, ''),
])
def test_how_it_ends(code, status, errors):
    done = forks.run('-c', f'import atexit; print("begun", flush=True); atexit.register(print, "ended")\n{code}')
    assert done.returncode == status and done.stderr.endswith(errors)
    assert done.stdout == ('begun\n' if status == -9 else 'begun\nended\n')


def test_limit():
    code = 'print("begun", flush=True); import time; time.sleep(60)'
    done = forks.forks(True).run(('-c', code), forks.ROOT, os.environ, limit=0.5)
    assert (done.returncode, done.stdout) == (-1, 'begun\n')
