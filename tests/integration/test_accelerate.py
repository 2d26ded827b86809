"""`accelerate launch`, on one process and on two: the same gradients, averaged over twice the ranks."""

import json

import pytest

from tests.integration.process import SCRIPTS, run


def test_two_processes_train_as_one(tmp_path):
    reports = []
    for processes in (1, 2):
        run(
            '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', processes, '--num_machines', 1,
            '--mixed_precision', 'no', '--dynamo_backend', 'no',
            '-m', 'fla_longhorn', SCRIPTS / 'train_with_accelerate.py', f'on-{processes}', cwd=tmp_path,
        )
        reports.append(json.loads((tmp_path / f'on-{processes}' / 'losses.json').read_text()))
    assert [report['processes'] for report in reports] == [1, 2]
    one, two = (report['losses'] for report in reports)
    assert len(one) == 8 and one[-1] < 0.9 * one[0]
    assert two == pytest.approx(one, rel=1e-4)
