"""`python -m benchmarks calibrate`: calls as they were timed, points that may set constants, a table that is not stale."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from triton.runtime.autotuner import Config

from benchmarks.calibration.calls import PACKAGES, WITHOUT_CALL
from benchmarks.calibration.errors import KINDS, error_bars, errors, summary, with_error_bars
from benchmarks.calibration.points import OTHER_CODE, SET_BY, read
from benchmarks.calibration.run import constants
from benchmarks.calibration.tuning import FIRST, Tuning
from benchmarks.report.page import RESULTS
from offgpu.predict.machine import Machine
from tests import forks

CALLS = """
import json
from offgpu.absent_device import announced
from offgpu.launches import make_driver, rehearsal, spread

with announced(make_driver('sm_90', 'launch')):
    from benchmarks.calibration.calls import call_of
    from benchmarks.calibration.points import read
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
    """Never by what was left out, nor by calls whose code is not what was timed."""
    points = {(p.kernel, p.direction): p for p in read()}
    for name, (value, by, _) in SET_BY.items():
        field = name.rpartition('.')[2]
        assert field in Machine.__dataclass_fields__, name
        machine = constants()[name.rpartition('.')[0] or 'H100']
        assert machine[field] == pytest.approx(value), name
        for kernel, direction in by:
            assert points[kernel, direction].group == 'fitted', name
    assert {p.group for p in read()} == {'fitted', 'left out', 'other code'}
    assert all((kernel, direction) in points for kernel, direction in OTHER_CODE)


def test_the_table_is_not_stale():
    """Made with the constants of now, of the points of now; its errors are those of its rows."""
    report = json.loads((RESULTS / 'calibration.json').read_text())
    assert report['constants'] == json.loads(json.dumps(constants()))
    points = [json.loads(json.dumps(asdict(p) | {'group': p.group})) for p in read()]
    rows = [{name: row[name] for name in points[0]} for row in report['rows']]
    assert all(row in points for row in rows)
    left = [p for p in points if p not in rows]
    assert [p['shape'] for p in left] == [p['shape'] for p in report['not_predicted']]
    assert report['errors'] == summary(report['rows'])
    for row in report['rows']:
        assert row['ratio'] == pytest.approx(row['predicted_ms'] / row['ms'], abs=1e-3)


def test_errors_by_hand():
    rows = [{'ms': 1.0, 'predicted_ms': x} for x in (1.1, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0)]
    e = errors(rows)
    assert (e['median'], e['nine_of_ten'], e['largest'], e['within_15']) == (0, 0.2, 1, 0.8)


def test_error_bars_by_hand():
    """Nine of ten points of a kind lie within; what has other code says nothing, and a bound has no bar."""
    rows = [{'kernel': 'chunk_gla', 'group': 'left out', 'ms': 1.0, 'predicted_ms': 1 + i / 100} for i in range(10)]
    rows += [{'kernel': 'chunk_gla', 'group': 'other code', 'ms': 1.0, 'predicted_ms': 3.0}]
    rows += [{'kernel': 'fused_recurrent_hgrn', 'group': 'fitted', 'ms': 1.0, 'predicted_ms': 0.5}]
    bars = {'chunks': {'points': 10, 'within': 0.08}, 'recurrences': {'points': 1, 'within': 0.5}}
    assert error_bars(rows) == bars
    times = [{'pass': 'exact_bwd', 'ms': 1.0}, {'pass': 'diagonal_fwd', 'ms': 2.0}, {'pass': 'exact_fwd', 'issue_ms': 1.0}]
    assert with_error_bars({'rows': times}, rows)['rows'] == [
        {'pass': 'exact_bwd', 'ms': 1.0, 'like': 'chunks', **bars['chunks']},
        {'pass': 'diagonal_fwd', 'ms': 2.0, 'like': 'recurrences', **bars['recurrences']},
        {'pass': 'exact_fwd', 'issue_ms': 1.0},
    ]


def test_every_kernel_has_a_kind():
    of_kinds = [kernel for kernels in KINDS.values() for kernel in kernels]
    assert len(of_kinds) == len(set(of_kinds))
    # of the first no timing is of today's code, of the second the shape is not known
    assert {p.kernel for p in read()} - set(of_kinds) == {'chunk_hgrn', 'mamba3_siso_bwd_kernel_dqkv'}
    assert {p.kernel for p in read()} == PACKAGES.keys() | WITHOUT_CALL.keys()


def test_predicted_times_carry_the_error_bars_of_the_table():
    predicted, table = (json.loads((RESULTS / f'{name}.json').read_text()) for name in ('predicted', 'calibration'))
    assert predicted == with_error_bars(predicted, table['rows'])
    assert all(0 < row['within'] < 0.3 for row in predicted['rows'] if 'ms' in row)


def test_tuning_goes_on_until_the_minimum_stays(tmp_path, monkeypatch):
    """On a slope of tiles and warps it ends at the lowest; what does not fit is not tried again."""
    configs = [Config({'B': b}, num_warps=w, num_stages=s) for b in (16, 32, 64) for w in (1, 2, 4, 8) for s in (2, 3)]
    seconds = {str(c): abs(c.kwargs['B'] - 32) + abs(c.num_warps - 4) + c.num_stages for c in configs}
    tuning, launched = Tuning(tmp_path), []
    for _ in range(20):
        chosen = [c for c in tuning.choose('kernel key', configs) if c.num_warps < 8]
        launched += map(str, chosen)
        tried = {str(c): float(seconds[str(c)]) for c in chosen}
        best = min(tried, key=tried.__getitem__)
        part = SimpleNamespace(tuned_for='kernel key', tried=tried, seconds=tried[best], least=0.0)
        if tuning.learn([part]):
            break
    assert best == str(next(c for c in configs if (c.kwargs['B'], c.num_warps, c.num_stages) == (32, 4, 2)))
    assert FIRST < len(set(launched)) < len(configs)
    tuning.save()
    assert [str(c) for c in Tuning(tmp_path).choose('kernel key', configs)] == [best]
    monkeypatch.setattr('triton.__version__', '9.9')
    assert not Tuning(tmp_path).seconds


def test_tuning_ends_where_moving_the_tensors_takes_as_long(tmp_path):
    configs = [Config({'B': b}) for b in (16, 32, 64, 128, 256, 512, 1024)]
    for least, done in ((1.0, False), (1.95, True)):
        tuning = Tuning(tmp_path)
        tried = {str(c): 2.0 + i for i, c in enumerate(tuning.choose('kernel key', configs))}
        assert tuning.learn([SimpleNamespace(tuned_for='kernel key', tried=tried, seconds=2.0, least=least)]) is done
