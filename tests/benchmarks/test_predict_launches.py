"""`python -m benchmarks predict`: what it takes from the wrappers, and what it writes; without TRITON_INTERPRET."""

import json

import pytest

from tests import forks

LAUNCHES = """
import json
from benchmarks.kernels.launches import Call, run_call
from benchmarks.predict.calls import PASSES, Shape
from offgpu.predict.capture import capture

out = {}
for B, T, V, K in SHAPES:
    for name, call in PASSES.items():
        found = capture(call(Shape(B, T, V, K), False), T, 'sm_90', 'launch')
        out[f'{name} {B} {T}'] = [[x.kernel, x.grid] for x in found if not x.kernel.startswith('torch.')]
    for update in ('diagonal', 'exact'):
        call = Call(exact=update == 'exact', B=B, T=T, V=V, K=K, layout='view', sigmoid=True, D=True, z=True)
        outcome = run_call(call, 'sm_90', 'launch')
        assert outcome.error is None, outcome.error
        out[f'{update} {B} {T}'] = [[x['kernel'], x['grid']] for x in outcome.launches]
print(json.dumps(out))
"""
# the last one's diagonal passes are cut in time if they are twice as long
SHAPES = ((8, 2048, 4096, 16), (1, 131072, 4096, 16), (1, 200, 1024, 16))


def test_launches_are_those_that_the_wrappers_make():
    launches = json.loads(forks.output('-c', LAUNCHES.replace('SHAPES', repr(SHAPES))).splitlines()[-1])
    for B, T, *_ in SHAPES:
        for update in ('diagonal', 'exact'):
            passes = launches[f'{update}_fwd {B} {T}'] + launches[f'{update}_bwd {B} {T}']
            assert passes == launches[f'{update} {B} {T}']


@pytest.mark.slow
def test_the_command(tmp_path):
    """A row that the file holds of this commit is not made again."""
    file = tmp_path / 'predicted.json'
    shape = ('--pass', 'exact_fwd', '--K', '16', '--shape', '1,2048,1024')
    command = ('-m', 'benchmarks', 'predict', *shape, '--json', str(file))
    text = forks.output(*command)
    report = json.loads(file.read_text())
    (row,) = report['rows']
    assert text.startswith(f'H100 exact_fwd B=1 T=2048 V=1024 K=16: {row["ms"]:.3f} ms')
    assert row['ms'] == pytest.approx(sum(k['ms'] for k in row['kernels']), abs=1e-3)
    assert row['ratio'] == pytest.approx(row['ms'] / max(row['dram_floor_ms'], row['issue_floor_ms']), rel=0.02)
    assert row['bytes'] > row['bytes_needed']
    assert forks.output(*command) == '' and json.loads(file.read_text())['rows'] == [row]
