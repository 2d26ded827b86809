"""The core in fla's tree, where no package of this repository can be imported: the same code, which runs there."""

import inspect
import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import fla
import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from tests import forks
from tests.upstream.core import destination, find_core
from tests.upstream.edits import PARAMETERS
from tests.upstream.pieces import INSERTED, insert
from tests.upstream.train import CORE, train
from tests.upstream.tree import Report, make_tree, write_patches

WITH_CUDA = pytest.mark.skipif(torch.backends.cuda.is_built(), reason='the pretend device needs a CPU build of torch')
# offgpu has the pretend device
DEVICES = ['cpu', *([pytest.param('cuda', marks=[pytest.mark.compiler, WITH_CUDA])] if find_spec('offgpu') else [])]
BLOCKED = ('fla_cpu', 'fla_kit', 'fla_longhorn', 'fla_longhorn_cpu')
IMPORT_ALL = '''
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import fla
print(fla.__file__, fla.Longhorn.__module__, fla.ops.chunk_longhorn.__module__, fla.LonghornForCausalLM.__module__)
'''


@pytest.fixture(scope='module')
def reports(folder: Path) -> list[Report]:
    return write_patches(folder / 'tree', installed=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('upstream')
    (folder / 'blocked').mkdir()
    for name in BLOCKED:
        (folder / 'blocked' / f'{name}.py').write_text(f'raise ImportError("{name} is imported in fla\'s tree")\n')
    return folder


@pytest.fixture(scope='module')
def paths(folder: Path, reports: list[Report]) -> list[str]:
    """What programs find modules in: the tree's fla, and tools of the tests."""
    return [str(folder / 'blocked'), str(folder / 'tree'), str(forks.ROOT)]


def tree_of(folder: Path, patches: list[Report]) -> list[str]:
    """The same of a tree with some of the patches."""
    path = folder / f'with-{len(patches)}'
    make_tree(path, installed=True)
    for report in patches:
        subprocess.run(['git', 'apply', folder / 'tree' / report.patch], cwd=path, check=True)
    return [str(folder / 'blocked'), str(path), str(forks.ROOT)]


@pytest.fixture(scope='module')
def first(folder: Path, reports: list[Report]) -> list[str]:
    return tree_of(folder, reports[:1])


@pytest.fixture(scope='module')
def second(folder: Path, reports: list[Report]) -> list[str]:
    return tree_of(folder, reports[:2])


@pytest.fixture(scope='module')
def third(folder: Path, reports: list[Report]) -> list[str]:
    return tree_of(folder, reports[:3])


def test_the_patches_apply_and_remove_nothing_of_fla(folder, reports, first):
    make_tree(folder / 'again', installed=True)
    for report in reports:
        subprocess.run(['git', 'apply', folder / 'tree' / report.patch], cwd=folder / 'again', check=True)
    assert 'deletion' not in reports[0].changes
    made, again = ({x.relative_to(y): x.read_text() for x in y.rglob('*.py')} for y in (folder / 'tree', folder / 'again'))
    assert made == again
    installed = Path(fla.__file__).resolve().parent
    command = ['git', 'diff', '--no-index', '--numstat', installed, folder / 'tree/fla']
    changes = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert not [line for line in changes if line.split()[1] not in ('0', '-') and '__pycache__' not in line]


def test_the_first_patches_are_small_and_name_only_what_they_have(reports):
    first, second, third = reports[:3]
    assert first.lines <= 3500
    assert first.named == second.named == []
    later = r'pool\b|diagonal form|fla_longhorn|cp_context'
    assert not re.search(rf'{later}|per_channel|PER_CHANNEL|mma\.', first.text)
    assert not re.search(rf'{later}|mma\.', second.text)
    assert not re.search(later, third.text)


def test_longhorn_is_in_the_lists_of_the_repository(tmp_path):
    """Which the distributions lack."""
    for name, places in INSERTED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('\n' + ''.join(f'{line}0\n' for line, _ in places))
    # of another version
    changed = tmp_path / 'benchmarks/ops/registry.py'
    changed.write_text('\n# another group\n')
    assert insert(tmp_path) == [('benchmarks/ops/registry.py', '# --- +gate + beta ---\n')]
    assert changed.read_text() == '\n# another group\n'
    assert (tmp_path / 'README.md').read_text().splitlines()[1].split('|')[2].strip() == 'Longhorn'
    assert (tmp_path / 'tests/layers/test_layer_cache_layer_idx.py').read_text() == (
        '\nfrom fla.layers.longhorn import Longhorn\nfrom fla.layers.mamba import 0\n'
        '    pytest.param(lambda: Longhorn(hidden_size=16), torch.randn(1, 2, 16), id="longhorn"),\n'
        '    pytest.param(\n        lambda: Mamba(hidden_size=16),\n0\n'
    )


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
    from offgpu.pretend.build import build
    from offgpu.pretend.install import with_site

    build()
    return {'PYTHONPATH': with_site(os.pathsep.join(paths)), 'PRETEND_CUDA': '1', 'PRETEND_SMS': '2'}


@pytest.mark.slow
@pytest.mark.parametrize(('tree', 'number'), [('first', 27), ('second', 29), ('third', 29), ('paths', 56)])
@pytest.mark.parametrize('device', DEVICES)
def test_operators(device, tree, number, request):
    """The operators' tests in the patches."""
    paths = request.getfixturevalue(tree)
    plugin = ('-p', 'tests.upstream.plugin') if device == 'cpu' else ()
    options = ('-q', '-p', 'no:cacheprovider', *plugin, '-k', 'not bfloat16')
    printed = forks.output(
        '-m', 'pytest', *options, 'tests/ops/test_longhorn.py', cwd=Path(paths[1]), env=environment(paths, device), fla=False,
    )
    assert f'{number} passed' in printed


def test_wrong_edits_are_of_each_parameter():
    """`make mutate` makes them: the operator's parameters, and sequences that fill no chunk."""
    assert [*PARAMETERS] == [*inspect.signature(chunk_longhorn).parameters]


@pytest.mark.slow
@pytest.mark.parametrize('device', DEVICES)
def test_model(device, paths, tmp_path):
    """With fla's own kernels: what the plugin computes on the CPU."""
    env = environment(paths, device)
    found = json.loads(forks.output('-m', 'tests.upstream.train', device, cwd=tmp_path, env=env, fla=False))
    assert found.keys() == set(CORE)
    for name, got in found.items():
        expected = train(name, 'cpu', fused=True)
        assert got['loss'] == pytest.approx(expected['loss'], rel=1e-5)
        assert got['gradients'] == pytest.approx(expected['gradients'], rel=1e-4)
        assert got['tokens'][0] == got['tokens'][1] == expected['tokens'][0]


@pytest.mark.slow
@pytest.mark.parametrize('device', DEVICES)
def test_first_model(device, first, tmp_path):
    """The plain layer and model, with the weights of the plugin's: what that computes on the CPU."""
    names = {'exact': 'first', 'gate': 'first gate'}
    weights = tmp_path / 'weights.pt'
    expected = {name: train(name, 'cpu', fused=True, save=weights.with_stem(name)) for name in names}
    env = environment(first, device)
    for name, plain in names.items():
        arguments = ('-m', 'tests.upstream.train', device, plain, weights.with_stem(name))
        got = json.loads(forks.output(*arguments, cwd=tmp_path, env=env, fla=False))[plain]
        assert got['loss'] == pytest.approx(expected[name]['loss'], rel=1e-5)
        assert got['gradients'] == pytest.approx(expected[name]['gradients'], rel=1e-4)
        assert got['tokens'][0] == got['tokens'][1] == expected[name]['tokens'][0]
