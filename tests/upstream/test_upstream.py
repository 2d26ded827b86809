"""The core in fla's tree, where no package of this repository can be imported: the same code, which runs there."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from offgpu.pretend.build import build
from offgpu.pretend.install import with_site
from tests import forks
from tests.upstream.core import destination, find_core
from tests.upstream.train import OPTIONS, train
from tests.upstream.tree import Report, make_tree, write_patch

WITH_CUDA = pytest.mark.skipif(torch.backends.cuda.is_built(), reason='the pretend device needs a CPU build of torch')
DEVICES = ['cpu', pytest.param('cuda', marks=[pytest.mark.compiler, WITH_CUDA])]
BLOCKED = ('fla_cpu', 'fla_kit', 'fla_longhorn', 'fla_longhorn_cpu')
IMPORT_ALL = '''
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import fla
print(fla.__file__, fla.Longhorn.__module__, fla.ops.chunk_longhorn.__module__, fla.LonghornForCausalLM.__module__)
'''


@pytest.fixture(scope='module')
def report(folder: Path) -> Report:
    return write_patch(folder / 'tree', installed=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('upstream')
    (folder / 'blocked').mkdir()
    for name in BLOCKED:
        (folder / 'blocked' / f'{name}.py').write_text(f'raise ImportError("{name} is imported in fla\'s tree")\n')
    return folder


@pytest.fixture(scope='module')
def paths(folder: Path, report: Report) -> list[str]:
    """What programs find modules in: the tree's fla, and tools of the tests."""
    return [str(folder / 'blocked'), str(folder / 'tree'), str(forks.ROOT)]


def test_the_patch_applies_and_removes_nothing(folder, report):
    make_tree(folder / 'again', installed=True)
    subprocess.run(['git', 'apply', folder / 'tree/longhorn.patch'], cwd=folder / 'again', check=True)
    assert 'deletion' not in report.patch
    made, again = ({x.relative_to(y): x.read_text() for x in y.rglob('*.py')} for y in (folder / 'tree', folder / 'again'))
    assert made == again


@pytest.mark.slow
def test_imports(paths, tmp_path):
    modules = ('.'.join(destination(module).with_suffix('').parts) for module in find_core())
    names = [module.removesuffix('.__init__') for module in modules]
    printed = forks.output('-c', IMPORT_ALL, *names, cwd=tmp_path, env={'PYTHONPATH': os.pathsep.join(paths)}, fla=False)
    places = ['fla.layers.longhorn', 'fla.ops.longhorn.chunk', 'fla.models.longhorn.modeling_longhorn']
    assert printed.split() == [f'{paths[1]}/fla/__init__.py', *places]


def environment(paths: list[str], device: str) -> dict[str, str]:
    """Triton's interpreter on the CPU, or the pretend device."""
    if device == 'cpu':
        return {'PYTHONPATH': os.pathsep.join(paths), 'TRITON_INTERPRET': '1'}
    build()
    return {'PYTHONPATH': with_site(os.pathsep.join(paths)), 'PRETEND_CUDA': '1', 'PRETEND_SMS': '2'}


@pytest.mark.slow
@pytest.mark.parametrize('device', DEVICES)
def test_operators(device, paths):
    """The operators' tests in the patch."""
    plugin = ('-p', 'tests.upstream.plugin') if device == 'cpu' else ()
    options = ('-q', '-p', 'no:cacheprovider', *plugin, '-k', 'not bfloat16')
    printed = forks.output(
        '-m', 'pytest', *options, 'tests/ops/test_longhorn.py', cwd=Path(paths[1]), env=environment(paths, device), fla=False,
    )
    assert '56 passed' in printed


@pytest.mark.slow
def test_wrong_edits_of_parameters_are_noticed(paths):
    """Each of the operator's parameters, in its value and its gradient, and sequences that fill no chunk."""
    names = [*inspect.signature(chunk_longhorn).parameters, 'T']
    env = {**os.environ, **forks.ENVIRONMENT, **environment(paths, 'cpu')}
    # longer than a program of `forks` may run: a minute of imports and a test for each edit where others use the cores
    done = subprocess.run(
        [sys.executable, '-m', 'tests.upstream.edits', paths[1]], cwd=forks.ROOT, env=env, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    noticed = re.findall(r'^(\w+): .*: test_\w+', done.stdout, re.M)
    assert [*dict.fromkeys(noticed)] == names


@pytest.mark.slow
@pytest.mark.parametrize('device', DEVICES)
def test_model(device, paths, tmp_path):
    """With fla's own kernels: what the plugin computes on the CPU."""
    env = environment(paths, device)
    found = json.loads(forks.output('-m', 'tests.upstream.train', device, cwd=tmp_path, env=env, fla=False))
    assert found.keys() == OPTIONS.keys()
    for name, got in found.items():
        expected = train(name, 'cpu', fused=True)
        assert got['loss'] == pytest.approx(expected['loss'], rel=1e-5)
        assert got['gradients'] == pytest.approx(expected['gradients'], rel=1e-4)
        assert got['tokens'][0] == got['tokens'][1] == expected['tokens'][0]
