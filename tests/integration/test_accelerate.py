"""accelerate, on one process and on two: the same gradients, averaged over the ranks."""

import json

import pytest

from tests.integration.process import SCRIPTS, run

LAUNCH = ('-m', 'accelerate.commands.launch', '--num_processes', 1, '--num_machines', 1, '--mixed_precision', 'no',
          '--dynamo_backend', 'no')
# on CPUs accelerate leaves it to torchrun or mpirun to start more than one process, and two do not share one GPU
TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', 2)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path, device):
    reports = []
    launch = (*LAUNCH, '--cpu') if device.type == 'cpu' else LAUNCH
    for i, (launcher, place) in enumerate(((launch, device), (TORCHRUN, 'cpu'))):
        run(*launcher, '-m', 'fla_longhorn', SCRIPTS / 'train_with_accelerate.py', f'run-{i}', place, cwd=tmp_path)
        reports.append(json.loads((tmp_path / f'run-{i}' / 'losses.json').read_text()))
    assert [(report['processes'], report['device']) for report in reports] == [(1, device.type), (2, 'cpu')]
    one, two = (report['losses'] for report in reports)
    assert len(one) == 8 and one[-1] < 0.9 * one[0]
    assert two == pytest.approx(one, rel=1e-4)
