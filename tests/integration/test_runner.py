"""`python -m fla_longhorn program` behaves as `python program`, and the program finds Longhorn without importing it."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fla_longhorn
from tests import forks

PACKAGE = Path(fla_longhorn.__file__).parent

# tells how it was started, then fails with a message
PROGRAM = '''
import pickle
import sys
print(__name__, __file__, sys.argv, sys.path[0])
class Kept:
    pass
print(type(pickle.loads(pickle.dumps(Kept()))) is Kept)
sys.exit(f'{sys.argv[1:]} is wrong')
'''


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    """Programs of every kind, and the runner in an otherwise empty package, which starts at once."""
    folder = tmp_path_factory.mktemp('programs')
    host = folder / 'site' / 'fla_longhorn' / 'contrib'
    for path in (folder / 'elsewhere', folder / 'packaged', host):
        path.mkdir(parents=True)
    for path in ('program.py', 'elsewhere/program.py', 'packaged/__main__.py'):
        (folder / path).write_text(PROGRAM)
    (folder / 'packaged' / '__init__.py').touch()
    (folder / 'link.py').symlink_to('elsewhere/program.py')
    with zipfile.ZipFile(folder / 'archive.zip', 'w') as archive:
        archive.writestr('__main__.py', PROGRAM)
    (host / 'host.py').write_text("print('host')")
    shutil.copy(PACKAGE / '__main__.py', host.parent)
    return folder


def run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=folder,
        env={**os.environ, 'PYTHONPATH': str(folder / 'site'), 'PYTHONDONTWRITEBYTECODE': '1', **env},
    )


SCRIPTS = ('program.py a --b -m c', 'link.py', 'packaged', 'archive.zip')
MODULES = ('-m program a --b -m c', '-m elsewhere.program', '-m packaged')


@pytest.mark.parametrize(('command', 'safe'), [*itertools.product(SCRIPTS, ('', '1')), *((x, '') for x in MODULES)])
def test_the_same_as_python(folder, command, safe):
    """Status, output and the error, but for a script's absolute path."""
    words = command.split()
    ours, wanted = (run(folder, *runner, *words, PYTHONSAFEPATH=safe) for runner in (('-m', 'fla_longhorn'), ()))
    assert wanted.returncode == ours.returncode == 1
    assert ours.stdout == wanted.stdout.replace(f'[{words[0]!r}', f'[{str(folder / words[0])!r}')
    assert ours.stderr == wanted.stderr


def test_command_line(folder):
    """The host is imported before the program."""
    done = run(folder, '-m', 'fla_longhorn', '--with', 'host', 'program.py')
    assert done.returncode == 1 and done.stdout.startswith('host\n__main__')
    done = run(folder, '-m', 'fla_longhorn', '--help')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('usage: python -m fla_longhorn [--with HOST] SCRIPT')
    for args, message in {
        (): 'a script or -m MODULE is missing', ('-m',): '-m needs the name of a module', ('-x',): 'unknown option -x',
        ('missing.py',): "can't open file", ('--with',): '--with takes the name of a module',
        ('--with', 'x', 'program.py'): '--with takes the name of a module',
    }.items():
        done = run(folder, '-m', 'fla_longhorn', *args)
        assert (done.returncode, done.stdout) == (2, '') and f'error: {message}' in done.stderr and 'usage:' in done.stderr


SPAWNING = '''
import json
import multiprocessing
import sys
from fla.layers import Longhorn
from transformers import AutoConfig

class Question:
    def __init__(self, name):
        self.name = name

def answer(question):
    return question.name in sys.modules, type(question).__module__, AutoConfig.for_model('longhorn').model_type

if __name__ == '__main__':
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(json.dumps(pool.map(answer, [Question('fla_longhorn'), Question('nothing')])))
'''


@pytest.mark.slow
def test_the_plugin_is_there(tmp_path):
    """In the program, which names it nowhere, and in the processes that the program spawns."""
    (tmp_path / 'program.py').write_text(SPAWNING)
    printed = forks.output('-m', 'fla_longhorn', 'program.py', cwd=tmp_path, fla=False)
    assert json.loads(printed) == [[True, '__mp_main__', 'longhorn'], [False, '__mp_main__', 'longhorn']]
