"""What installing and importing do: the wheel, the registration, the errors for missing dependencies."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fla_longhorn
from fla_longhorn import requirements
from fla_longhorn.requirements import REQUIREMENTS, check_requirements
from tests import forks

ROOT = forks.ROOT
# importing takes seconds, so one process checks several things
ORDERS = {
    'plugin first': 'import fla_longhorn; from fla_longhorn import *; import fla; fla_longhorn.register()',
    'fla first': 'import transformers; from fla.models import GLAConfig; from fla.ops import chunk_gla; import fla_longhorn',
    'submodule first': 'import fla_longhorn.ops.naive',
}

# fla itself asks a GPU for its name when it is imported; who else starts CUDA is noted
WATCH = '''
import sys, torch, traceback, triton
callers, start_cuda = [], torch.cuda._lazy_init
def watched():
    files = [frame.filename for frame in traceback.extract_stack()[:-1]]
    callers.append(next(x for x in reversed(files) if '/torch/' not in x and '/triton/' not in x))
    start_cuda()
torch.cuda._lazy_init = watched
launches = []
triton.knobs.runtime.launch_enter_hook = launches.append
triton.compile = lambda *args, **kwargs: launches.append(args)
'''
NOTHING_STARTED = '''
assert all('/fla/' in x for x in callers), callers
assert not launches, launches
assert 'numba' not in sys.modules
'''


@pytest.mark.parametrize('order', list(ORDERS))
def test_registration(order):
    """All names are there whatever is imported first; no kernel ran or compiled, no GPU was touched."""
    forks.output('-c', WATCH + ORDERS[order] + NOTHING_STARTED + '''
import fla, fla.ops, fla.layers, fla.models, fla_longhorn
from fla_longhorn import naive_recurrent_longhorn
from fla_longhorn.models import LonghornModel
from importlib import import_module
OPS = ['chunk_longhorn', 'fused_recurrent_longhorn']
MODELS = ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel']
for package, names in {'ops': OPS, 'layers': ['Longhorn'], 'models': MODELS}.items():
    inner, outer = import_module(f'fla.{package}.longhorn'), import_module(f'fla.{package}')
    for name in names:
        assert getattr(inner, name) is getattr(outer, name) is getattr(fla_longhorn, name), name
        assert outer.__all__.count(name) == 1, name
for name in ('Longhorn', 'LonghornForCausalLM', 'LonghornModel'):
    assert getattr(fla, name) is getattr(fla_longhorn, name) and fla.__all__.count(name) == 1, name
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
tiny = AutoConfig.for_model('longhorn', hidden_size=16, num_hidden_layers=1, vocab_size=8)
built = tiny, AutoModelForCausalLM.from_config(tiny), AutoModel.from_config(tiny)
assert [type(x).__name__ for x in built] == MODELS
''', fla=False)


@pytest.mark.parametrize(('found', 'bounds', 'kind', 'message'), [
    (None, '>=1.0', ImportError, 'fla-longhorn needs torch>=1.0, which is not installed: pip install it'),
    ('2.6.9', '>=2.7', ImportError, 'needs torch>=2.7, found 2.6.9'),
    # who builds from source may import the package
    ('2.7.0a0+git1234', '>=2.7', None, ''),
    ('2.7.1+cu128', '>=2.7', None, ''),
])
def test_requirements(found, bounds, kind, message, monkeypatch):
    monkeypatch.setattr(requirements, 'installed_version', lambda name: found)
    with pytest.raises(kind, match=message) if kind else nullcontext():
        check_requirements({'torch': (bounds, 'pip install it')})


def check_wheel(name: str, folder: str, packages: Iterable[str], others: Iterable[str], tmp_path: Path) -> None:
    """One `py3-none-any` wheel: its modules, the files beside them, and nothing else."""
    # a build leaves files behind, and takes up those of an earlier one
    tree = shutil.copytree(ROOT / folder, tmp_path / 'tree', ignore=shutil.ignore_patterns(
        '.git', '.venv*', 'build', 'dist', 'outputs', '*.egg-info', '__pycache__',
        *(['packages', 'lab'] if folder == '.' else []),
    ))
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '-w', tmp_path, tree],
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob('*.whl')
    assert wheel.name == f'{name}-{fla_longhorn.__version__}-py3-none-any.whl'
    with zipfile.ZipFile(wheel) as archive:
        names = {x for x in archive.namelist() if '.dist-info/' not in x}
    files = [path for package in packages for path in (tree / package).rglob('*.py')]
    files += [path for pattern in others for path in tree.glob(pattern)]
    assert names == {str(path.relative_to(tree)) for path in files}


@pytest.mark.slow
def test_the_wheel_holds_the_package(tmp_path):
    check_wheel('fla_longhorn', '.', ['fla_longhorn'], ['fla_longhorn/py.typed'], tmp_path)


def test_importing_checks_the_declared_bounds():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    lines = [*project['dependencies'], *project['optional-dependencies']['cpu']]
    declared = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    for name, (bounds, _) in REQUIREMENTS.items():
        assert bounds in str(declared[name]).split(','), name


def test_one_version():
    """Of the plugin, the changelog and, where the commit has one, the tag."""
    version = fla_longhorn.__version__
    heading = re.search(r'^## (\S+) \((.+)\)$', (ROOT / 'CHANGELOG.md').read_text(), re.M)
    assert heading[1] == version
    # a source distribution is no checkout
    done = subprocess.run(['git', 'tag', '--points-at', 'HEAD', 'v*'], cwd=ROOT, capture_output=True, text=True)
    if tags := done.stdout.split():
        assert tags == [f'v{version}']
        assert re.fullmatch(r'\d{4}-\d\d-\d\d', heading[2]), heading[0]
