"""`python -m benchmarks predict`: what it takes from the wrappers, what it writes, and what it refuses."""

import json

import pytest

from benchmarks.predict.run import machine_of, main
from tests import forks


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="gpu must be one of .*, got B300: no others' constants"):
        machine_of('B300', [])
    with pytest.raises(ValueError, match='set takes a number .* got speed=1'):
        machine_of('H100', ['speed=1'])
    assert machine_of('H100', ['dram=700', 'l2_bytes_per_clock=20']).dram == 700
    with pytest.raises(SystemExit):
        main(['--shape', '8,2048'])


LAUNCHES = """
from benchmarks.kernels.launches import Call, run_call
from benchmarks.predict.calls import PASSES, Shape
from offgpu.predict.capture import capture

# the last one's diagonal passes are split along the sequence if they are twice as long
for B, T, V, K in (8, 2048, 4096, 16), (1, 131072, 4096, 16), (1, 200, 1024, 16):
    for update in ('diagonal', 'exact'):
        passes = []
        for name in (f'{update}_fwd', f'{update}_bwd'):
            found = capture(PASSES[name](Shape(B, T, V, K)), T, 'sm_90', 'launch')
            passes += [(x.kernel, list(x.grid)) for x in found if not x.kernel.startswith('torch.')]
        call = Call(exact=update == 'exact', B=B, T=T, V=V, K=K, layout='view', sigmoid=True, D=True, z=True)
        outcome = run_call(call, 'sm_90', 'launch')
        assert outcome.error is None, outcome.error
        assert passes and passes == [(x['kernel'], list(x['grid'])) for x in outcome.launches], (update, B, T)
"""


def test_launches_are_those_that_the_wrappers_make():
    forks.output('-c', LAUNCHES)


@pytest.mark.slow
def test_the_command(tmp_path):
    """It says what was compiled by which Triton, for which card, and what the host is left to do."""
    file = tmp_path / 'predicted.json'
    shape = ('--pass', 'exact_fwd', '--K', '16', '--shape', '1,2048,1024')
    command = ('-m', 'benchmarks', 'predict', *shape, '--json', str(file))
    text = forks.output(*command)
    report = json.loads(file.read_text())
    (row,) = report['rows']
    assert text.startswith(f'H200, Triton {row["triton"]}, exact_fwd B=1 T=2048 V=1024 K=16: GPU {row["ms"]:.3f} ms within ')
    assert 'host about 0.27 ms for 3 launches' in text and row['loops'] in ('up to 768', 'above 768')
    assert [k['loops'] for k in row['kernels']][0] == [] and row['kernels'][1]['loops']
    assert row['ms'] == pytest.approx(sum(k['ms'] for k in row['kernels']), abs=1e-3)
