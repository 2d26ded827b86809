"""The operators' benchmark: its data fits together, all rows are complete, and a wrong operator is not timed."""

import inspect
import json

import pytest
import torch

from benchmarks.measure import timing
from benchmarks.ops import run
from benchmarks.ops.registry import OPERATORS, SHAPE_SETS, Shape
from fla_longhorn.ops import chunk_longhorn

SHAPE = ['--shape', 'B=1', 'T=32', 'H=2', 'K=4', 'V=8', '--seconds', '0', '--verify_gradients', '16', '--device', 'cpu']
BY_NAME = {f'{x.name}-{x.backend}': x for x in OPERATORS}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(timing, 'device_rates', lambda device: {'bytes_per_s': 1e10, 'fma_per_s': 1e10})


def wrong_gradient(q, k, v, beta, exact):
    o, state = chunk_longhorn(q, k, v, beta, exact=exact)
    return o + v - v.detach(), state


def wrong_later(q, k, v, beta, exact):
    o, state = chunk_longhorn(q, k, v, beta, exact=exact)
    return (o if q.shape[1] <= 16 else o.flip(1)), state


def refuses(q, k, v, beta, exact):
    raise NotImplementedError('not at this shape')


def test_rows(tmp_path):
    path = tmp_path / 'ops.json'
    operators = ['chunk_longhorn', 'naive_recurrent', 'delta_rule_recurrence', 'mamba']
    run.main([*SHAPE, '--operators', *operators, '--json', str(path)])
    report = json.loads(path.read_text())
    rows = report['rows']
    assert {(row['operator'], row['backend']) for row in rows} >= {
        ('chunk_longhorn', 'numba'), ('chunk_longhorn exact scalar', 'torch'), ('naive_recurrent_longhorn exact', 'naive'),
        ('delta_rule_recurrence', 'naive'), ('mamba2_chunk_scan', 'transformers'),
    }
    assert [row for row in rows if row['status'] != 'ok'] == []
    for row in rows:
        assert max(row['errors'].values()) <= 1e-3 and 'o of all tokens' in row['errors']
        assert row['saved_bytes'] > 0
        for name in run.PASSES:
            figures = row[name]
            assert 0 < figures['ms_low'] <= figures['ms'] <= figures['ms_high'] and figures['repeats'] >= 3
            assert figures['floor_ms'] > 0 and figures['of_longhorn'] > 0
    assert 'runs on cuda only' in report['not_run'].values()


@pytest.mark.parametrize(('function', 'status', 'reason'), [
    (wrong_gradient, 'wrong', 'dv'), (wrong_later, 'wrong', 'o of all tokens'), (refuses, 'failed', 'NotImplementedError'),
])
def test_wrong_is_not_timed(tmp_path, monkeypatch, capsys, function, status, reason):
    right = BY_NAME['chunk_longhorn-numba']
    bad = type(right)(**{**vars(right), 'name': 'bad', 'function': f'{__name__}:{function.__name__}'})
    monkeypatch.setattr(run, 'OPERATORS', (right, bad))
    run.main([*SHAPE, '--json', str(tmp_path / 'ops.json')])
    good, row = json.loads((tmp_path / 'ops.json').read_text())['rows']
    assert good['status'] == 'ok'
    assert row['status'] == status and reason in row['reason']
    assert 'forward' not in row and 'forward_backward' not in row
    assert f'{status}: ' in capsys.readouterr().out


@pytest.mark.parametrize('name', BY_NAME)
def test_data(name):
    """The inputs are what function and reference take, the reference's output has the row's shape, and states are equal."""
    operator = BY_NAME[name]
    for shape in (*SHAPE_SETS['cuda']['equal_state'], *SHAPE_SETS['cpu']['equal_state']):
        assert operator.equal_state(shape).state == shape.state
    shape = Shape(2, 3, 1, 4, 8)
    inputs = {x: y.draw(shape, torch.device('cpu'), torch.float64, torch.Generator()) for x, y in operator.inputs.items()}
    if not operator.function.startswith('mamba_ssm'):
        inspect.signature(operator.load()).bind(**inputs, **operator.options)
    o = operator.reference(*inputs.values())
    assert list(o.shape) == [getattr(shape, dim) for dim in operator.output]
    assert set(torch.autograd.grad(o.sum(), list(inputs.values()))) and o.isfinite().all()


def test_saved_bytes():
    x = torch.randn(4, 8, requires_grad=True)
    assert timing.saved_bytes(lambda: x.exp()) == x.nbytes
    assert timing.saved_bytes(lambda: x * x) == x.nbytes
