"""`python -m benchmarks calibrate`: calls as they were timed, points that may set constants, a table that is not stale."""

from dataclasses import asdict

import pytest
from triton.runtime.autotuner import Config

from benchmarks.predict.calibrate import chosen_before
from offgpu.calibration.errors import error_bars, errors, loop_class
from offgpu.calibration.points import SET_BY, read
from offgpu.predict.machine import h100


def test_constants_are_set_by_fitted_points():
    """Never by what was left out."""
    points = {(p.kernel, p.direction): p for p in read()}
    for name, (value, by, _) in SET_BY.items():
        assert asdict(h100())[name] == pytest.approx(value), name
        assert {points[key].group for key in by} == {'fitted'}, name
    assert {p.group for p in read()} == {'fitted', 'left out'}


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
