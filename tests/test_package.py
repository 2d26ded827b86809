"""What installing and importing do: the wheel, the registration, the errors for missing dependencies."""

import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import warnings
import zipfile
from contextlib import nullcontext
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fla_longhorn
from fla_longhorn import requirements
from fla_longhorn.requirements import REQUIREMENTS, check_requirements
from tests import forks

ROOT = Path(__file__).parents[1]


def python(code: str) -> None:
    """In a process that has imported neither fla nor the plugin."""
    done = forks.run('-c', code, fla=False)
    assert done.returncode == 0, done.stderr


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
    python(WATCH + ORDERS[order] + NOTHING_STARTED + '''
import fla, fla.ops, fla.layers, fla.models
from fla.ops import chunk_longhorn, fused_recurrent_longhorn
from fla.ops.longhorn import chunk_longhorn as again, naive_recurrent_longhorn
from fla.layers import Longhorn
from fla.layers.longhorn import Longhorn as same
from fla.models import LonghornConfig, LonghornForCausalLM, LonghornModel
from fla.models.longhorn import LonghornConfig as config
import fla.ops.longhorn, fla.layers.longhorn, fla.models.longhorn
import fla_longhorn
assert chunk_longhorn is again is fla_longhorn.chunk_longhorn is fla.ops.chunk_longhorn
assert Longhorn is same is fla_longhorn.Longhorn is fla.Longhorn
assert config is LonghornConfig is fla_longhorn.LonghornConfig
assert fla.LonghornForCausalLM is LonghornForCausalLM
for package, names in ((fla.ops, ['chunk_longhorn', 'fused_recurrent_longhorn']), (fla.layers, ['Longhorn']),
                       (fla.models, ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel']),
                       (fla, ['Longhorn', 'LonghornForCausalLM', 'LonghornModel'])):
    for name in names:
        assert package.__all__.count(name) == 1, (package, name)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
tiny = AutoConfig.for_model('longhorn', hidden_size=16, num_hidden_layers=1, vocab_size=8)
assert type(tiny) is LonghornConfig
assert type(AutoModel.from_config(tiny)) is LonghornModel
assert type(AutoModelForCausalLM.from_config(tiny)) is LonghornForCausalLM
''')


def test_one_interface():
    """The three ops are interchangeable: the same arguments in the same order, with the same defaults."""
    signatures = [
        inspect.signature(op) for op in
        (fla_longhorn.chunk_longhorn, fla_longhorn.fused_recurrent_longhorn, fla_longhorn.naive_recurrent_longhorn)
    ]
    assert signatures[0] == signatures[1] == signatures[2]


def test_register_is_idempotent():
    before = list(sys.modules['fla.ops'].__all__)
    fla_longhorn.register()
    assert sys.modules['fla.ops'].__all__ == before


class TestRequirements:
    def check(self, name, bounds, remedy='pip install'):
        with pytest.raises(ImportError) as error:
            check_requirements({name: (bounds, remedy)})
        return str(error.value)

    def test_missing(self):
        message = self.check('no-such-thing', '>=1.0', "pip install 'fla-longhorn[cpu]'")
        assert message == "fla-longhorn needs no-such-thing>=1.0, which is not installed: pip install 'fla-longhorn[cpu]'"

    def test_too_old(self):
        assert 'needs torch>=99.0, found' in self.check('torch', '>=99.0')
        assert 'needs torch>=99.0,<100, found' in self.check('torch', '>=99.0,<100')

    def test_newer_than_tested(self):
        """A warning: who builds fla from source may import the package."""
        with pytest.warns(UserWarning, match='tested with flash-linear-attention>=0.1,<0.2, found 0.'):
            check_requirements({'flash-linear-attention': ('>=0.1,<0.2', 'pip install')})

    @pytest.mark.parametrize(('found', 'what'), [
        ('2.7.0a0+git1234', None), ('2.7.1+cu128', None), ('2.6.9', ImportError), ('3.0.0.dev20260101', UserWarning),
    ])
    def test_builds_from_source(self, found, what, monkeypatch):
        monkeypatch.setattr(requirements, 'installed_version', lambda name: found)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            with pytest.raises(what) if what else nullcontext():
                check_requirements({'torch': ('>=2.7,<3', 'pip install')})

    def test_triton_is_named_when_it_is_missing(self):
        """In a process where the distribution can't be found, importing says what to install, in one error."""
        done = subprocess.run([sys.executable, '-c', '''
import importlib.metadata as metadata
find = metadata.version
def version(name):
    if 'triton' in name:
        raise metadata.PackageNotFoundError(name)
    return find(name)
metadata.version = version
import fla_longhorn
'''], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last == (
            'ImportError: fla-longhorn needs triton>=3.6, which is not installed: '
            "pip install 'fla-longhorn[cpu]' or 'fla-longhorn[cuda]'"
        )


@pytest.fixture(scope='module')
def sdist(tmp_path_factory) -> Path:
    """The source distribution of this tree, unpacked."""
    folder = tmp_path_factory.mktemp('sdist')
    # a build leaves files behind, and takes up those of an earlier one
    tree = shutil.copytree(ROOT, folder / 'tree', ignore=shutil.ignore_patterns(
        '.git', '.venv', 'build', 'dist', 'outputs', '*.egg-info', '__pycache__',
    ))
    build = 'import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))'
    done = subprocess.run([sys.executable, '-c', build, folder], capture_output=True, text=True, cwd=tree)
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter='data')
    return folder / f'fla_longhorn-{fla_longhorn.__version__}'


def tracked_files() -> set[str]:
    """The files of the checkout, without those that only the repository has a use for, or of the sdist itself."""
    if (ROOT / '.git').exists():
        done = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, check=True, capture_output=True, text=True)
        names = {name for name in done.stdout.split('\0') if (ROOT / name).is_file()}
    else:
        names = {str(path.relative_to(ROOT)) for path in ROOT.rglob('*') if path.is_file() and path.suffix != '.pyc'}
    return {name for name in names if not name.startswith('.') and name not in BUILT and '.egg-info/' not in name}


# what building adds at the top of a source distribution
BUILT = {'PKG-INFO', 'setup.cfg'}


class TestDistributions:
    def test_sdist_is_the_checkout(self, sdist):
        names = {str(path.relative_to(sdist)) for path in sdist.rglob('*') if path.is_file()}
        assert {name for name in names - BUILT if '.egg-info/' not in name} == tracked_files()

    @pytest.mark.slow
    def test_tests_of_the_sdist_run(self, sdist):
        """Every test module finds what it imports, and tests of the documents and the settings find them."""
        pytest_there = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
        environment = {**os.environ, 'PYTHONPATH': '', 'PYTHONDONTWRITEBYTECODE': '1'}
        for args in (['--collect-only', 'tests'], ['tests/test_readme.py::test_links', 'tests/test_layout.py']):
            done = subprocess.run([*pytest_there, *args], capture_output=True, text=True, cwd=sdist, env=environment)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr

    @pytest.mark.slow
    def test_wheel_is_pure(self, sdist, tmp_path):
        """Built from the sdist: one `py3-none-any` wheel with the typing marker, modules and tasks, and nothing else."""
        done = subprocess.run(
            [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '-w', tmp_path, sdist],
            capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = tmp_path.iterdir()
        assert wheel.name == f'fla_longhorn-{fla_longhorn.__version__}-py3-none-any.whl'
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            (about,) = (archive.read(name).decode() for name in names if name.endswith('.dist-info/METADATA'))
        modules = [path for name in ('fla_cpu', 'fla_longhorn') for path in (ROOT / name).rglob('*.py')]
        files = [*modules, ROOT / 'fla_longhorn_vllm.py', *(ROOT / 'fla_longhorn/contrib/lm_eval/tasks').iterdir()]
        sources = {str(path.relative_to(ROOT)) for path in files if path.is_file()}
        assert sources | {'fla_cpu/py.typed', 'fla_longhorn/py.typed'} == {name for name in names if '.dist-info/' not in name}
        assert any(name.endswith('licenses/LICENSE') for name in names)
        extras = message_from_string(about).get_all('Provides-Extra')
        assert extras == ['cpu', 'cuda', 'vision'], 'an extra serves the package; what serves a checkout is a dependency group'


class TestBounds:
    """The bounds in pyproject.toml, those that importing checks, fla's own and the pinned versions."""

    PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    PINS = [Requirement(line) for line in (ROOT / 'constraints.txt').read_text().splitlines() if not line.startswith('#')]

    @staticmethod
    def lowest(specifier: SpecifierSet) -> Version:
        return max((Version(x.version) for x in specifier if x.operator in ('>=', '==')), default=Version('0'))

    def declared(self) -> dict[str, SpecifierSet]:
        project = self.PROJECT['project']
        lines = [*project['dependencies'], *project['optional-dependencies']['cpu']]
        return {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}

    def test_importing_checks_the_same(self):
        declared = self.declared()
        for name, (bounds, _) in REQUIREMENTS.items():
            assert declared[name] == SpecifierSet(bounds), name

    def test_fla_asks_for_no_newer_one(self):
        """A lower bound that fla would not install is no promise."""
        declared = self.declared()
        for distribution in ('flash-linear-attention', 'fla-core'):
            for line in metadata.requires(distribution):
                asked = Requirement(line)
                if asked.name in declared and (asked.marker is None or asked.marker.evaluate({'extra': 'cpu'})):
                    assert self.lowest(declared[asked.name]) >= self.lowest(asked.specifier), line

    def test_pins(self):
        """They are within the bounds, and install on every Python that is promised."""
        declared, python = self.declared(), self.PROJECT['project']['requires-python']
        lowest = python.removeprefix('>=')
        for pin in self.PINS:
            (version,) = (x.version for x in pin.specifier)
            assert version in declared.get(pin.name, SpecifierSet()), pin
            if metadata.version(pin.name) == version:
                assert lowest in SpecifierSet(metadata.metadata(pin.name).get('Requires-Python', '')), pin
        assert self.PROJECT['tool']['ruff']['target-version'] == f'py{lowest.replace(".", "")}'
        assert f'Programming Language :: Python :: {lowest}' in self.PROJECT['project']['classifiers']
