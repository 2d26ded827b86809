"""The GPU's day rehearsed: every step of `benchmarks.all` at tiny sizes, on the pretend device."""

import json

import pytest

from benchmarks import all as every


# the self check belongs to CI
@pytest.mark.parametrize('step', [
    pytest.param(step.name, marks=[] if step.name == 'selfcheck' else [pytest.mark.slow]) for step in every.STEPS
])
def test_step(step, tmp_path, capfd):
    arguments = ['--device', 'cuda', '--tiny', '--workers', '1', '--output_dir', str(tmp_path), '--steps', step]
    status = every.main(arguments)
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert (status, summary[step]['state']) == (0, 'ok'), (tmp_path / f'{step}.log').read_text()
    for path in tmp_path.glob('*.json'):
        report = json.loads(path.read_text())
        assert path.name == 'summary.json' or 'H100' in json.dumps(report), path
