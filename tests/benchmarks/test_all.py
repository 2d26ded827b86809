"""The run of everything for a GPU: a step that fails or hangs stops no other, and every step's command is one that exists."""

import json

import pytest

import benchmarks.all as every
from benchmarks.all import STEPS, Step
from benchmarks.models import run as model
from benchmarks.ops import run as ops

VALUES = {'device': 'cpu', 'device_name': 'cpu', 'out': 'out', 'workers': 2}
HANG = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('kept what there was')
    raise SystemExit(3)
"""


def test_steps_go_on(tmp_path, monkeypatch, capsys):
    (tmp_path / 'hang.py').write_text(HANG)
    monkeypatch.setattr(every, 'STEPS', (
        Step('fails', 60, '-m no_such_module', ''), Step('hangs', 3, '{out}/hang.py', ''), Step('works', 60, '-m this', ''),
    ))
    assert every.main(['--device', 'cpu', '--output_dir', str(tmp_path)]) == 1
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert [row['state'] for row in summary.values()] == ['failed (1)', 'out of time', 'ok']
    assert summary['hangs']['last_line'] == 'kept what there was'
    assert 'No module named no_such_module' in capsys.readouterr().out
    assert every.main(['--device', 'cpu', '--output_dir', str(tmp_path), '--steps', 'works']) == 0


@pytest.mark.parametrize('name, tiny', [('ops', False), ('ops', True), ('model', True)])
def test_commands_are_understood(name, tiny, monkeypatch):
    """What a step asks of a benchmark is what its parser takes."""
    step = next(step for step in STEPS if step.name == name)
    flag, package, command, *arguments = step.arguments(tiny, **VALUES)
    assert (flag, package, command) == ('-m', 'benchmarks', name)
    if name == 'ops':
        parsed = ops.parse_arguments(arguments)
        assert parsed.json == 'out/cpu_ops.json' and bool(parsed.shape) == tiny
    else:
        monkeypatch.setattr(model, 'MODELS', ())
        monkeypatch.setattr(model.timing, 'write_report', lambda report, path: None)
        monkeypatch.setattr(model.plots, 'draw_models', lambda report, path: None)
        model.main(arguments)


def test_tests_exist():
    arguments = STEPS[0].arguments(False, **VALUES)
    assert all((every.ROOT / word).exists() for word in arguments if word.startswith('tests/'))
