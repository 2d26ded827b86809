"""The run on a GPU, with planted faults: what comes back is complete each time."""

import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from benchmarks.gpu import filling, kit, lane, more_tests, page, passes, run, smoke, watch
from benchmarks.gpu.results import Results
from benchmarks.gpu.run import Stage
from benchmarks.gpu.tests import by_turn
from benchmarks.operators import LonghornKernels
from benchmarks.tests.faults import FAULTS
from fla_longhorn.ops import chunk_longhorn
from offgpu.launches import rehearsal

# a test looks at all processes that others start
pytestmark = pytest.mark.xdist_group('gpu')

PLANTED = Stage('planted', 'benchmarks.tests.faults', 10, 3)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """What describes the machine takes seconds to import."""
    monkeypatch.setattr(run, 'about_machine', lambda device: {'device': device, 'versions': {}})


def call(folder: Path, *stages: Stage, minutes: float = 10.0) -> int:
    return run.main(['--minutes', str(minutes), '--output', str(folder), '--device', 'cpu'], stages)


def items_of(folder: Path) -> dict[str, dict]:
    return {record['item']: record for record in Results(folder).records if 'item' in record}


def test_faults(tmp_path, capsys):
    """An error, a hang, a death and a stage that cannot start: each is told by name, and the others go on."""
    before = {process.pid for process in psutil.process_iter()}
    broken = Stage('broken', 'benchmarks.tests.no_such_module', 1, 4)
    assert call(tmp_path / 'out', broken, PLANTED) == 1
    found = items_of(tmp_path / 'out')
    assert [*found] == [*FAULTS]
    assert found['raises']['error'].endswith('ValueError: the whole error,\nof several lines\n')
    assert found['raises']['rows'] == [{'begun': 'raises'}]
    assert 'hangs did not end within' in found['hangs']['error'] and 'faults.py' in found['hangs']['error']
    assert 'its last words' in found['dies']['error'] and 'ended its process with status -11' in found['dies']['error']
    assert not any('error' in found[name] for name in ('prints', 'works'))
    # what a process started ends with it
    new = [p for p in psutil.process_iter() if p.pid not in before and p.status() != psutil.STATUS_ZOMBIE]
    left = [p for p in new if 'benchmarks.gpu.work' in ' '.join(p.cmdline())]
    assert not left
    text = (tmp_path / 'out' / 'page.md').read_text()
    assert text in capsys.readouterr().out
    first = text.splitlines()[0]
    assert first.startswith('First error: broken: ') and "No module named 'benchmarks.tests.no_such_module'" in first
    assert '| broken | not reached | 0 | 1 |' in text and '| planted | all | 5 | 3 | 0 |' in text
    # all has ended: nothing runs again, but the stage that did not start
    assert call(tmp_path / 'out', PLANTED) == 1
    assert len(items_of(tmp_path / 'out')) == len(FAULTS)


def test_what_is_not_in_the_cache(tmp_path, monkeypatch):
    """The kernels that an item compiles are named; with their cache, none is."""
    monkeypatch.setenv('PLANTED', 'compiles')
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path / 'triton'))
    for name, compiled in (('first', ['planted_kernel']), ('again', [])):
        assert call(tmp_path / name, Stage('planted', 'benchmarks.tests.faults', 10, 300)) == 0
        found = items_of(tmp_path / name)
        assert found['compiles']['compiled'] == compiled and not found['works']['compiled']


def test_a_second_call_goes_on(tmp_path, monkeypatch):
    """The time is up in the middle of a stage: each item runs once in both calls together."""
    monkeypatch.setenv('PLANTED', 'waits')
    slow, later = (Stage(name, 'benchmarks.tests.faults', 10, 60) for name in ('slow', 'later'))
    add = run.Run.add

    def add_until(self, stage, record):
        add(self, stage, record)
        if len(items_of(tmp_path)) == 3:
            self.end = 0.0

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, 'add', add_until)
        assert call(tmp_path, slow, later) == 0
    text = (tmp_path / 'page.md').read_text()
    assert '| slow | in part | 3 |' in text and '| later | not reached | 0 |' in text
    assert call(tmp_path, slow, later) == 0
    for stage in ('slow', 'later'):
        names = [record['item'] for record in Results(tmp_path).records if record.get('stage') == stage and 'item' in record]
        assert sorted(names) == [f'waits {i}' for i in range(8)]


def parts_of(monkeypatch, tmp_path, seconds: float, wanted: dict[str, float]) -> dict[str, list[float]]:
    """The parts that the stages of the plan get by a clock that stages alone move; each takes what it wants of its own."""
    now, parts = [0.0], {stage.name: [] for stage in run.STAGES}

    def run_stage(self, stage, part):
        parts[stage.name].append(round(part, 1))
        took = min(part, wanted.get(stage.name, 1e9))
        now[0] += took
        wanted[stage.name] = wanted.get(stage.name, 1e9) - took
        return wanted[stage.name] > 0

    monkeypatch.setattr(run, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(run.Run, 'run_stage', run_stage)
    monkeypatch.setattr(run.Run, 'prepare', lambda self, stage, later, first: None)
    run.Run(run.STAGES, Results(tmp_path), 'cpu', seconds, {}).run()
    return parts


def test_shares_by_the_clock(monkeypatch, tmp_path):
    """Nine minutes as the plan has them; what a stage leaves is the later ones', and a second turn's."""
    with monkeypatch.context() as patch:
        parts = parts_of(patch, tmp_path, 540.0, {})
    assert parts == {
        'smoke': [30.0], 'passes': [150.0], 'tests': [150.0], 'loops': [30.0], 'steps': [90.0], 'more_tests': [25.0],
        'learning': [40.0], 'tuning': [25.0],
    }
    with monkeypatch.context() as patch:
        parts = parts_of(patch, tmp_path, 120.0, {'smoke': 1.0, 'tests': 10.0, 'tuning': 0.0})
    # the last stage wants nothing: the others share what is left once more
    assert parts['smoke'] == [6.7] and parts['passes'][0] == pytest.approx(119 * 150 / 510, abs=0.1)
    assert parts['steps'][0] > 90 / 540 * 120 and len(parts['passes']) > 1


PROBES = {
    'a build without CUDA': (
        "torch.ones = fail(AssertionError('Torch not compiled with CUDA enabled'))\ntorch.version.cuda = None",
        'without CUDA, sees 0 GPUs: Torch not compiled with CUDA enabled',
    ),
    'no driver': (
        "torch.ones = fail(RuntimeError('Found no NVIDIA driver on your system.\\nPlease check'))",
        'Found no NVIDIA driver on your system.',
    ),
    'a build for other cards': (
        "torch.ones = fail(RuntimeError('CUDA error: no kernel image is available\\nfor debugging consider'))",
        'CUDA error: no kernel image is available',
    ),
    'no compiler': (
        "torch.ones = lambda *_, **__: torch.tensor(1.0)\nprobe.launch_triton = fail(RuntimeError('no C compiler'))",
        'no C compiler',
    ),
    'a library that ends the process': ("import os; os._exit(3)", 'the process that looks for it ended: status 3'),
}


@pytest.mark.parametrize('why', PROBES)
def test_without_a_gpu(why, tmp_path, monkeypatch, capsys):
    """One line at once, of what PyTorch sees: no folder, no process of a stage."""
    planted, reason = PROBES[why]
    code = f"""
import sys
import torch
from benchmarks.gpu import probe

def fail(error):
    def raises(*args, **options):
        raise error
    return raises

torch.cuda.device_count = lambda: 0

{planted}
probe.main(sys.argv[1])
"""
    monkeypatch.setattr(watch, 'PROBE', ['-c', code])
    monkeypatch.setattr(run, 'about_machine', watch.about_machine)
    monkeypatch.setattr(run.Run, 'run', lambda self: pytest.fail('it went on'))
    monkeypatch.chdir(tmp_path)
    assert run.main(['--kit', str(tmp_path / 'none')]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith('nothing runs on cuda: ') and printed.count('\n') == 1 and reason in printed
    assert not list(tmp_path.iterdir())


def test_full_disk(tmp_path, capsys):
    """What cannot be written is printed, and written once there is room."""
    (tmp_path / 'results.jsonl').symlink_to('/dev/full')
    results = Results(tmp_path)
    results.add({'stage': 'a', 'item': 'one', 'rows': [1]})
    printed = capsys.readouterr().out
    assert 'No space left' in printed and json.loads(printed[printed.index('{'):]) == results.records[0]
    (tmp_path / 'results.jsonl').unlink()
    results.add({'stage': 'a', 'item': 'two', 'rows': [2]})
    # half a line, as a call that is killed leaves
    with (tmp_path / 'results.jsonl').open('a') as file:
        file.write('{"stage": "a", "item": "thr')
    again = Results(tmp_path)
    assert again.records == results.records and again.ended['a'] == {'one', 'two'}
    again.add({'stage': 'a', 'item': 'three'})
    assert Results(tmp_path).ended['a'] == {'one', 'two', 'three'}


@triton.autotune([triton.Config({'B': B}) for B in (16, 32)], key=['N'])
@triton.jit
def tuned(x, N, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, B, mask=at < N)


def test_only_compiling(tmp_path):
    """All configurations are compiled, once, and nothing is launched."""
    counts = Counter()
    with rehearsal('sm_80', 'code') as launches, knobs.cache.scope(), knobs.compilation.scope():
        knobs.compilation.listener = lambda *, cache_hit, **_: counts.update([cache_hit])
        knobs.cache.dir = str(tmp_path)
        for wanted in ({False: 2}, {True: 2}):
            counts.clear()
            tuned.fn.device_caches.clear()
            with filling.only_compiling():
                tuned[(1,)](torch.empty(64, dtype=torch.float32, device='meta'), 64)
            assert counts == wanted and not launches


def test_few_configurations():
    many = triton.autotune([triton.Config({'B': B}) for B in range(17)], key=['N'])(tuned.fn)
    with passes.few_configurations():
        assert len(many.prune_configs({})) == 6 and many.prune_configs({})[0] is many.configs[0]
        assert len(tuned.prune_configs({})) == 2


def test_passes_have_both_sets_of_exact_kernels():
    for K in (16, 64):
        launched = []
        for name in ('exact', 'exact, general kernels'):
            with rehearsal('sm_90', 'launch') as launches, LonghornKernels():
                rows = list(passes.run(f'{name}, K = {K}, 8 x 2048 x 4096', 'meta'))
            assert [row['pass'] for row in rows] == ['fwd', 'bwd']
            launched.append({x.kernel for x in launches if x.kernel.endswith('_mma')})
        assert len(launched[0]) == (2 if K == 16 else 3) and not launched[1]


@pytest.mark.parametrize('stage', [stage.name for stage in run.STAGES if 'tests' not in stage.name])
def test_stages_without_memory(stage):
    """The calls that are compiled beforehand are calls that can be made, evaluation's too: the first item of each stage."""
    module = importlib.import_module(f'benchmarks.gpu.{stage}')
    with rehearsal('sm_90', 'launch') as launches, LonghornKernels(), filling.loss_without_memory():
        rows = [*module.run(module.items('meta')[0], 'meta')]
    assert (launches or stage == 'loops') and (rows or stage != 'learning')


def test_stages_find_their_packages(monkeypatch):
    """On a machine to which the checkout was copied, nothing of it is installed: all is found by the path."""
    monkeypatch.delenv('PYTHONPATH', raising=False)
    code = f'import {", ".join(stage.module for stage in run.STAGES)}'
    environment = lane.with_kit({'PYTHONPATH': sysconfig.get_paths()['purelib'], 'FLA_LONGHORN_PATCH': 'none'})
    # without entries of `.pth` files, by which it is installed here
    subprocess.run([sys.executable, '-S', '-c', code], check=True, env=environment, cwd='/')


def test_the_cpu_stands_for_a_gpu():
    """Calls on the CPU's tensors launch as on a GPU, the modules' too, and what they return is not compared."""
    x = torch.randn(1, 8, 1, 16)
    with rehearsal('sm_90', 'launch') as launches, filling.standing_for_gpu():
        o = chunk_longhorn(x, x, x, x.sigmoid())[0]
        torch.testing.assert_close(o, x)
    assert launches


def test_each_function_once_then_the_other_parameter_sets():
    names = ['a[1]', 'a[2]', 'a[3]', 'b', 'c[1]', 'c[2]']
    assert by_turn(names) == (['a[1]', 'b', 'c[1]'], ['a[2]', 'c[2]', 'a[3]']) and by_turn([]) == ([], [])


def test_smoke_launches_every_kernel():
    """Kernels by their names in the sources: a new one wants a case."""
    with rehearsal('sm_90', 'launch') as launches, LonghornKernels():
        for item in smoke.PLAN:
            [*smoke.run(item, 'meta')]
    sources = [path.read_text() for path in (lane.ROOT / 'fla_longhorn/ops/triton').rglob('*.py')]
    named = {name for text in sources for name in re.findall(r'^def (\w+_kernel\w*)\(\n', text, re.M)}
    assert len(named) > 12 and named <= {launch.kernel for launch in launches}


def test_page_has_predictions_beside_measurements(monkeypatch):
    known = {'gpu': 'H100', 'pass': 'exact_fwd', 'K': 16, 'B': 8, 'T': 2048, 'V': 4096, 'ms': 0.29}
    load = page.load
    monkeypatch.setattr(page, 'load', lambda name: [known] if name == 'predicted' else load(name))
    row = {'pass': 'fwd', 'ms': 9.0, 'kernels_ms': 2 * known['ms']}
    records = [{'stage': 'passes', 'item': 'exact, K = 16, 8 x 2048 x 4096', 'rows': [row]}]
    line = page.make(records, [('passes', 'passes')]).splitlines()[-1]
    assert line.startswith('| exact | K = 16 | 8 x 2048 x 4096 | fwd | 0.58 | 9 |')
    assert line.endswith(f'| {page.number(known["ms"])} | 2 |')


def test_kit(tmp_path, monkeypatch):
    """A cache that is packed and unpacked elsewhere has its kernels, and says where they lie now."""
    cache, folder = tmp_path / 'cache' / 'KEY', tmp_path / 'kit'
    cache.mkdir(parents=True)
    for name in ('k.cubin', 'k.json', 'k.ptx'):
        (cache / name).write_text(name)
    paths = {name: str(cache / name) for name in ('k.cubin', 'k.json', 'k.ptx')}
    (cache / '__grp__k.json').write_text(json.dumps({'child_paths': paths}))
    monkeypatch.setattr(kit.subprocess, 'run', lambda *args, **options: None)
    monkeypatch.setattr(kit.tempfile, 'gettempdir', lambda: str(tmp_path / 'there'))
    (cache.parent / 'OLD').mkdir()
    (cache.parent / 'OLD' / 'k.cubin').touch()
    Results(tmp_path / 'filled').add({'stage': 'a', 'item': 'one', 'used': ['KEY']})
    # as Python 3.11.2 has it
    extract = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, 'extractall', lambda self, path: extract(self, path))
    monkeypatch.delattr(tarfile, 'data_filter', raising=False)
    kit.pack(cache.parent, tmp_path / 'filled', folder)
    there = Path(kit.unpack(folder)['TRITON_CACHE_DIR']) / 'KEY'
    assert os.listdir(there.parent) == ['KEY']
    assert sorted(os.listdir(there)) == ['__grp__k.json', 'k.cubin', 'k.json']
    kept = json.loads((there / '__grp__k.json').read_text())['child_paths']
    assert kept == {name: str(there / name) for name in ('k.cubin', 'k.json')}
    monkeypatch.setattr(kit, 'LIMIT', 100)
    with pytest.raises(SystemExit, match='kit must be at most 0 MiB'):
        kit.pack(cache.parent, tmp_path / 'filled', folder)


def test_other_parameter_sets_without_those_of_a_quarter_of_the_kit(monkeypatch):
    sizes = 'tests/ops/test_ones.py::test_sizes_of_one'
    monkeypatch.setattr(more_tests, 'collected', lambda device: [f'{sizes}[1]', f'{sizes}[2]', 'a[1]', 'a[2]'])
    assert more_tests.items('meta') == ['a[2]']
    assert re.search(r'\ndef test_sizes_of_one\(', Path(sizes.partition('::')[0]).read_text())
