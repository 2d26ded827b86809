"""The core in fla's tree, where no package of this repository can be imported: the same code, which runs there."""

import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import fla
import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from tests import forks
from tests.upstream.edits import PARAMETERS
from tests.upstream.pieces import INSERTED, PIECES, insert
from tests.upstream.train import CORE, train
from tests.upstream.tree import Report, make_tree, write_patches

WITH_CUDA = pytest.mark.skipif(torch.backends.cuda.is_built(), reason='the pretend device needs a CPU build of torch')
# offgpu has the pretend device
DEVICES = ['cpu', *([pytest.param('cuda', marks=[pytest.mark.compiler, WITH_CUDA])] if find_spec('offgpu') else [])]
# the plugin's options -> those of a tree in which exact is the only form
PLAIN = {'exact': 'first', 'gate': 'first gate'}
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


@pytest.fixture(scope='module')
def tree(folder: Path, reports: list[Report]) -> Callable[[int], list[str]]:
    """The same of a tree with the first patches."""
    @cache
    def make(number: int) -> list[str]:
        path = folder / f'with-{number}'
        make_tree(path, installed=True)
        for report in reports[:number]:
            subprocess.run(['git', 'apply', folder / 'tree' / report.patch], cwd=path, check=True)
        return [str(folder / 'blocked'), str(path), str(forks.ROOT)]

    return make


def test_the_patches_apply_and_remove_nothing_of_fla(folder, reports):
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


def test_no_line_names_the_plugin(reports):
    """Nor a package beside it: fla's tree has neither."""
    for report in reports:
        assert re.findall(r'(?i).*fla.longhorn.*', report.text) == []


# what the trees lack before the piece of this number
LATER = {
    2: r"per_channel|PER_CHANNEL|'channel'",
    3: r'mma\.',
    4: r'\bexact(=|: bool)|diagonal form',
    5: r'torch\.library|naive_chunk|cu_seqlens_cpu|intermediate_states',
    6: r'\bpool\b|Pool\b|POOLED|state_indices|state_update',
    7: 'cp_context|context_parallel|forward_summary',
    8: 'longhorn_utils',
    9: 'SequenceClassification',
}


def test_each_patch_is_small_and_has_nothing_of_later_ones(reports):
    assert [*LATER] == [*range(2, len(PIECES) + 1)]
    for number, report in enumerate(reports, 1):
        added = [line for line in report.text.splitlines() if line.startswith('+')]
        assert len(added) <= (3500 if number == 1 else 1700)
        later = re.compile('|'.join([*LATER.values()][number - 1:]) or '(?!)')
        assert [line for line in added if later.search(line)] == []


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
@pytest.mark.parametrize('number', range(1, len(PIECES) + 1))
def test_imports(number, tree, tmp_path):
    paths = tree(number)
    files = (x.relative_to(paths[1]).with_suffix('') for x in Path(paths[1], 'fla').rglob('*.py') if 'longhorn' in str(x))
    names = ['.'.join(x.parts).removesuffix('.__init__') for x in files]
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


# the last ones have no other operators
@pytest.mark.slow
@pytest.mark.parametrize(('number', 'passed'), [(1, 27), (2, 29), (3, 29), (4, 57), (5, 68), (6, 74), (7, 76), (9, 76)])
@pytest.mark.parametrize('device', DEVICES)
def test_operators(device, number, passed, tree):
    """The operators' tests in the patches."""
    paths = tree(number)
    plugin = ('-p', 'tests.upstream.plugin') if device == 'cpu' else ()
    options = ('-q', '-p', 'no:cacheprovider', *plugin, '-k', 'not bfloat16')
    printed = forks.output(
        '-m', 'pytest', *options, 'tests/ops/test_longhorn.py', cwd=Path(paths[1]), env=environment(paths, device), fla=False,
    )
    assert f'{passed} passed' in printed


@pytest.mark.slow
def test_context_parallelism(tree):
    """Its test in the patches: ranks are processes on the CPU."""
    paths = tree(7)
    options = ('-q', '-p', 'no:cacheprovider', '-p', 'tests.upstream.plugin')
    file, env = 'tests/context_parallel/test_cp_longhorn.py', environment(paths, 'cpu')
    assert '6 passed' in forks.output('-m', 'pytest', *options, file, cwd=Path(paths[1]), env=env, fla=False)


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
@pytest.mark.parametrize(('number', 'names'), [(1, PLAIN), (4, PLAIN | {'diagonal': 'diagonal'}), (8, PLAIN)])
@pytest.mark.parametrize('device', DEVICES)
def test_plain_model(device, number, names, tree, tmp_path):
    """The plain layer and model, with the weights of the plugin's: what that computes on the CPU."""
    weights = tmp_path / 'weights.pt'
    expected = {name: train(name, 'cpu', fused=True, save=weights.with_stem(name)) for name in names}
    env = environment(tree(number), device)
    for name, plain in names.items():
        arguments = ('-m', 'tests.upstream.train', device, plain, weights.with_stem(name))
        got = json.loads(forks.output(*arguments, cwd=tmp_path, env=env, fla=False))[plain]
        assert got['loss'] == pytest.approx(expected[name]['loss'], rel=1e-5)
        assert got['gradients'] == pytest.approx(expected[name]['gradients'], rel=1e-4)
        assert got['tokens'][0] == got['tokens'][1] == expected[name]['tokens'][0]
