"""What installing and importing do: the wheel, the registration, the errors for missing dependencies."""

import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fla_longhorn
from fla_longhorn import registry
from fla_longhorn.requirements import check_requirements

ROOT = Path(__file__).parents[1]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# importing takes seconds, so one process checks several things
ORDERS = {
    'plugin first': 'import fla_longhorn; from fla_longhorn import *; import fla; fla_longhorn.registry.register()',
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
    registry.register()
    assert sys.modules['fla.ops'].__all__ == before


class TestRequirements:
    def check(self, *requirement):
        with pytest.raises(ImportError) as error:
            check_requirements((requirement,))
        return str(error.value)

    def test_missing(self):
        message = self.check('no-such-thing', (1, 0), None, "pip install 'fla-longhorn[cpu]'")
        assert message == "fla-longhorn needs no-such-thing>=1.0, which is not installed: pip install 'fla-longhorn[cpu]'"

    def test_too_old(self):
        assert 'needs torch>=99.0, found' in self.check('torch', (99, 0), None, 'pip install')

    def test_too_new(self):
        message = self.check('flash-linear-attention', (0, 1), (0, 2), 'pip install')
        assert 'needs flash-linear-attention>=0.1,<0.2, found 0.' in message

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
            'ImportError: fla-longhorn needs triton>=3.3, which is not installed: '
            "pip install 'fla-longhorn[cpu]' or 'fla-longhorn[cuda]'"
        )


def test_wheel_is_pure(tmp_path):
    """One `py3-none-any` wheel with the typing marker and every module, and nothing else."""
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '-w', tmp_path, ROOT],
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f'fla_longhorn-{fla_longhorn.__version__}-py3-none-any.whl'
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / 'fla_longhorn').rglob('*.py')}
    assert sources | {'fla_longhorn/py.typed'} == {name for name in names if '.dist-info/' not in name}
    assert any(name.endswith('licenses/LICENSE') for name in names)
