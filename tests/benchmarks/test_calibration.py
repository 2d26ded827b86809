"""`python -m benchmarks calibrate`: calls as they were timed, points that may set constants, a table that is not stale."""

import json
from dataclasses import asdict

import pytest
from triton.runtime.autotuner import Config

from benchmarks.predict.calibrate import chosen_before
from offgpu.calibration.errors import error_bars, errors, loop_class, summary
from offgpu.calibration.points import SET_BY, read
from offgpu.predict.machine import h100
from tests import forks

CALLS = """
import json
from offgpu.absent_device import announced
from offgpu.launches import make_driver, rehearsal, spread

with announced(make_driver('sm_90', 'launch')):
    from offgpu.calibration.calls import call_of
    from offgpu.calibration.points import read
    from offgpu.predict.capture import take
    out = {}
    for p in read():
        if p.source.split()[0] in ('helion', 'fla'):
            call, T = call_of(p)
            out[f'{p.kernel} {p.shape} {p.direction}'] = [
                {'kernel': x.kernel, 'constants': {n: v for n, v in x.constants.items() if isinstance(v, int)},
                 'bytes': {a.name: a.nbytes for a in x.arguments if a.nbytes}, 'scalars': x.scalars,
                 'configuration': x.configuration}
                for x in take(call, T, 'sm_90', 'launch', spread(1))
            ]
    import fla.ops.common.chunk_h
    print(json.dumps([out, fla.ops.common.chunk_h.BKV_LIST]))
"""


@pytest.fixture(scope='module')
def launched():
    return json.loads(forks.output('-c', CALLS, fla=False).splitlines()[-1])


def test_calls_are_those_that_were_timed(launched):
    """By the sizes in the names of their shapes: k of B * T * H * D in 16 bits, H heads, gradients where timed."""
    calls = launched[0]
    for p in read():
        if p.source.split()[0] != 'helion':
            continue
        launches, s = calls[f'{p.kernel} {p.shape} {p.direction}'], p.sizes
        k = [x['bytes']['k'] for x in launches if 'k' in x['bytes']]
        assert k and set(k) == {2 * s['B'] * s['T'] * s['H'] * s['D']}, p.name
        assert {x['constants']['H'] for x in launches if 'H' in x['constants']} == {s['H']}, p.name
        assert {x['constants']['K'] for x in launches if 'K' in x['constants']} == {s['D']}, p.name
        assert {x['scalars']['T'] for x in launches if 'T' in x['scalars']} == {s['T']}, p.name
        assert any('bwd' in x['kernel'] for x in launches) == (p.direction == 'fwd+bwd'), p.name
    some = calls['fused_recurrent_hgrn B16_H4_T4096_D128 fwd']
    assert [x['bytes']['x'] for x in some] == [2 * 64 * 4096 * 128] and some[0]['scalars']['T'] == 4096


def test_kernels_get_what_the_gpu_lets_them_have(launched):
    """fla reads the GPU's shared memory when it is imported, and of a tensor's device: tiles of 64 and 128 on an H100."""
    calls, tiles = launched
    assert tiles == [32, 64]
    dv = {p.shape[-4:]: x['constants'] for p in read() if p.direction == 'fwd+bwd' and p.kernel == 'chunk_linear_attn'
          for x in calls[f'{p.kernel} {p.shape} {p.direction}'] if x['kernel'] == 'chunk_bwd_kernel_dv'}
    assert {D: (x['BK'], x['BV']) for D, x in dv.items()} == {'D128': (128, 128), 'D256': (128, 128)}
    (o,) = (x for x in calls['chunk_simple_gla B1_T8192_H96_D128 fwd'] if x['kernel'] == 'chunk_fwd_kernel_o')
    assert o['configuration'].startswith('BK: 128, BV: 128, num_warps: 8')


def test_constants_are_set_by_fitted_points():
    """Never by what was left out."""
    points = {(p.kernel, p.direction): p for p in read()}
    for name, (value, by, _) in SET_BY.items():
        assert asdict(h100())[name] == pytest.approx(value), name
        assert {points[key].group for key in by} == {'fitted'}, name
    assert {p.group for p in read()} == {'fitted', 'left out'}


def test_the_table_is_not_stale():
    """Made with the constants of now, of the points of now; its errors are those of its rows."""
    report = json.loads((forks.ROOT / 'benchmarks/results' / 'calibration.json').read_text())
    assert report['constants'] == json.loads(json.dumps(asdict(h100())))
    points = [json.loads(json.dumps(asdict(p) | {'group': p.group})) for p in read()]
    assert [{name: row[name] for name in points[0]} for row in report['rows']] == points
    assert report['errors'] == summary(report['rows'])
    assert all(row['loops'] == loop_class(k['loops'] for k in row['kernels']) for row in report['rows'])


def test_configurations_are_those_of_the_table():
    """By their entries, for Triton's versions print others beside them; the last of two where the table has none."""
    configs = [Config({'BK': size}, num_warps=warps) for size in (32, 64) for warps in (2, 4)]
    row = {'kernels': [{'kernel': 'k', 'configuration': f'{configs[1]}, other: 1'}, {'kernel': 'fixed', 'configuration': ''}]}
    choose = chosen_before(row)
    assert choose('k sm_90 K=64', configs) == [configs[1]]
    assert choose('new sm_90', configs) == chosen_before(None)('k sm_90', configs) == [configs[0], configs[3]]


def test_errors_by_hand():
    rows = [{'ms': 1.0, 'predicted_ms': x} for x in (1.1, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0)]
    e = errors(rows)
    assert (e['median'], e['nine_of_ten'], e['largest']) == (0, 0.2, 1)


def test_error_bars_by_hand():
    """Nine of ten with loops as long lie within; a call that waited for the host says nothing."""
    fit, longer = (loop_class([[61], x]) for x in ([768, 90], [769]))
    assert loop_class([[], []]) == fit != longer
    rows = [{'group': 'left out', 'loops': fit, 'ms': 1.0, 'predicted_ms': 1 + i / 100} for i in range(10)]
    rows += [{'group': 'host', 'loops': fit, 'ms': 1.0, 'predicted_ms': 3.0}]
    rows += [{'group': 'fitted', 'loops': longer, 'ms': 1.0, 'predicted_ms': 0.5}]
    assert error_bars(rows) == {fit: {'points': 10, 'within': 0.08}, longer: {'points': 1, 'within': 0.5}}
