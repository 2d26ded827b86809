"""`python -m benchmarks predict`: what it takes from the wrappers, and what it writes; without TRITON_INTERPRET."""

import json

import pytest

from benchmarks.predict.calls import PASSES, PEERS
from tests import forks

LAUNCHES = """
import json
from benchmarks.kernels.launches import Call, run_call
from benchmarks.predict.calls import PASSES, PEERS, Shape
from offgpu.predict.capture import capture
from offgpu.predict.times import shortened, walked_tokens

def described(x):
    tokens = walked_tokens(x)
    short = {} if tokens is None else {n: v for n, _, v in shortened(x, 64 / tokens)}
    return {'kernel': x.kernel, 'grid': x.grid, 'tokens': tokens, 'short': short, 'scalars': x.scalars}

out = {}
for B, T, V, K in SHAPES:
    for name, call in PASSES.items():
        out[f'{name} {B} {T}'] = [described(x) for x in capture(call(Shape(B, T, V, K), False), T, 'sm_90', 'launch')]
    for name, call in PEERS.items():
        if T <= 2048:
            out[f'{name} {B} {T}'] = [described(x) for x in capture(call(Shape(B, T, V, K), False), T, 'sm_90', 'launch')]
    for update in ('diagonal', 'exact'):
        call = Call(exact=update == 'exact', B=B, T=T, V=V, K=K, layout='view', sigmoid=True, D=True, z=True)
        outcome = run_call(call, 'sm_90', 'launch')
        assert outcome.error is None, outcome.error
        out[f'{update} {B} {T}'] = outcome.launches
print(json.dumps(out))
"""
SOURCES = """
import json
from benchmarks.predict.calls import PASSES, Shape
from offgpu.predict.capture import capture
from offgpu.predict.machine import h100
from offgpu.predict.sources import sources_of
from offgpu.predict.times import Runs, instructions_of, parts_of, predict_pass, walked_tokens

launches = capture(PASSES['exact_fwd'](Shape(9, 2048, 1024, 16), False), 2048, 'sm_90')
forward = launches[-1]
other, other_notes = capture(PASSES['exact_fwd'](Shape(9, 2048, 1024, 16), False), 2048, 'sm_100')[-1], []
runs = Runs(forward, [])
source = sources_of(forward, runs, parts_of(runs, walked_tokens(forward)), h100(), set())
parts = predict_pass(launches, h100())
print(json.dumps({
    'levels': source.levels, 'shares': source.shares, 'shared_bytes': source.shared_bytes,
    'bytes': {p.kernel: p.dram_bytes for p in parts}, 'notes': [n for p in parts for n in p.notes],
    'seconds': sum(p.seconds for p in parts), 'spans': [sum(p.share.values()) for p in parts],
    'counted': instructions_of(forward, []), 'issued': parts[-1].instructions,
    'counted on sm_100': instructions_of(other, other_notes), 'notes on sm_100': other_notes,
}))
"""
# the last one's diagonal passes are cut in time if they are twice as long
SHAPES = ((8, 2048, 4096, 16), (1, 131072, 4096, 16), (1, 200, 1024, 16))


def run(*args: str) -> str:
    process = forks.run(*args)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


@pytest.fixture(scope='module')
def launches() -> dict[str, list[dict]]:
    return json.loads(run('-c', LAUNCHES.replace('SHAPES', repr(SHAPES))).splitlines()[-1])


@pytest.mark.parametrize('update', ['diagonal', 'exact'])
@pytest.mark.parametrize('shape', SHAPES)
def test_launches_are_those_that_the_wrappers_make(launches, update, shape):
    B, T, *_ = shape
    passes = launches[f'{update}_fwd {B} {T}'] + launches[f'{update}_bwd {B} {T}']
    expected = [(x['kernel'], x['grid']) for x in launches[f'{update} {B} {T}']]
    assert [(x['kernel'], x['grid']) for x in passes if not x['kernel'].startswith('torch.')] == expected


def test_what_a_block_walks_over(launches):
    """Whole sequences or segments; a block of a fixed length has none, nor has PyTorch's own operation."""
    walks = {x['kernel']: x['tokens'] for name in PASSES for x in launches[f'{name} 8 2048']}
    assert walks['longhorn_fwd_kernel'] == walks['longhorn_bwd_kernel'] == 2048
    for fixed in ('longhorn_prepare_kernel', 'longhorn_reduce_kernel', 'chunk_longhorn_exact_kernel_gram', 'torch.sum'):
        assert walks[fixed] is None
    forward = next(x for x in launches['diagonal_fwd 1 131072'] if x['kernel'] == 'longhorn_fwd_kernel')
    # cut into segments: a block walks over one of them, at most half of the sequence
    assert forward['tokens'] == forward['scalars']['L'] <= 131072 // 2
    assert forward['short']['L'] == 64
    assert forward['short']['T'] == 64 * 131072 // forward['tokens']
    assert forward['short']['N'] == forward['scalars']['N'] == 1


def test_a_backward_of_fla_is_what_autograd_launches_after_the_forward(launches):
    """The forward's kernels are not among them, nor does PyTorch add to gradients of the inputs."""
    found = {name: [x['kernel'] for x in launches[f'{name} 8 2048']] for name in PEERS}
    for name, last in {'gla': 'gla_bwd_kernel_inter', 'delta_rule': 'bwd_kernel_dqkwg', 'kda': 'kda_bwd_kernel_intra'}.items():
        forward, backward = found[f'chunk_{name}_fwd'], found[f'chunk_{name}_bwd']
        assert f'chunk_{last}' in backward and f'chunk_{last}' not in forward
        assert any(kernel.endswith('fwd_kernel_o') or kernel == 'chunk_gla_fwd_kernel_o' for kernel in forward)
        assert not {'chunk_fwd_kernel_o', 'chunk_gla_fwd_kernel_o', 'torch.copy_', 'torch.zeros_like'} & set(backward)


@pytest.mark.slow
def test_where_tensors_come_from():
    """Blocks of channels read all of q, k and the Gram matrices of their sequence, and their own v, beta and z.

    With nine sequences the forward is not cut in time.
    """
    found = json.loads(run('-c', SOURCES).splitlines()[-1])
    assert {n for n, level in found['levels'].items() if level == 'l2'} >= {'q', 'k', 'gram', 'a'}
    assert not set(found['levels']) & {'v', 'beta', 'z', 'o'}
    forward = next(n for name, n in found['bytes'].items() if 'fwd_kernel_o' in name)
    # v, beta, z, o and the states of 128 tokens; q, k and the matrices once or not at all, as they lie in L2 by then
    streams = 9 * 2048 * 1024 * (4 * 2 + 16 * 4 / 128)
    assert streams <= forward < 1.06 * streams
    assert not found['notes']
    assert found['seconds'] > streams / 3.0e12
    assert all(0.9 < total < 1.1 for total in found['spans'])
    # what is counted without the simulation is what that issues
    assert found['counted'] == pytest.approx(found['issued'], rel=1e-3)
    assert 1.0 * found['counted'] > found['counted on sm_100'] > 0.8 * found['counted']
    assert not found['notes on sm_100']


@pytest.mark.slow
def test_the_command(tmp_path):
    """A row that the file holds of this commit is not made again."""
    file = tmp_path / 'predicted.json'
    shape = ('--pass', 'exact_fwd', '--K', '16', '--shape', '1,2048,1024')
    command = ('-m', 'benchmarks', 'predict', *shape, '--json', str(file))
    text = run(*command)
    report = json.loads(file.read_text())
    (row,) = report['rows']
    assert text.startswith(f'H100 exact_fwd B=1 T=2048 V=1024 K=16: {row["ms"]:.3f} ms')
    assert row['ms'] == pytest.approx(sum(k['ms'] for k in row['kernels']), abs=1e-3)
    assert row['ratio'] == pytest.approx(row['ms'] / max(row['dram_floor_ms'], row['issue_floor_ms']), rel=0.02)
    assert row['bytes'] > row['bytes_needed']
    assert run(*command) == '' and json.loads(file.read_text())['rows'] == [row]
