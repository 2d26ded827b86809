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


SCALAR = """
from benchmarks.predict.calls import SCALAR, Shape
from offgpu.predict.capture import capture

gla = {'fwd': 'chunk_gla_fwd_kernel_o', 'bwd': 'chunk_gla_bwd_kernel_inter'}
gate = {'fwd': 'torch.silu', 'bwd': 'torch.silu_backward'}
for name, make in SCALAR.items():
    launches = capture(make(Shape(1, 512, 256, 32)), 512, 'sm_90', 'launch')
    found = {x.kernel for x in launches}
    own, direction = name.startswith('diagonal'), name[-3:]
    of_longhorn = {x for x in found if 'longhorn' in x}
    assert of_longhorn == ({x for x in found if not x.startswith('torch.')} if own else set()), (name, found)
    assert (gla[direction] in found, gate[direction] in found) == (not own, not own), (name, found)
    assert f'longhorn_{direction}_kernel' in found or not own, (name, found)
    assert {a.nbytes for x in launches for a in x.arguments if a.name == 'beta'} == ({2 * 512} if own else set())
    # a pass has the kernels of its direction alone
    assert not found & {gla['fwd' if direction == 'bwd' else 'bwd']}
"""


def test_one_step_size_per_head_has_two_routes():
    """Longhorn's kernels alone, or fla's with PyTorch's around them."""
    forks.output('-c', SCALAR)


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
    assert 'host about 0.18 ms for 2 launches' in text and row['loops'] in ('up to 768', 'above 768')
    assert [k['loops'] for k in row['kernels']][0] == [] and row['kernels'][1]['loops']
    assert row['ms'] == pytest.approx(sum(k['ms'] for k in row['kernels']), abs=1e-3)
