"""transformers' Trainer: a run that is resumed from its checkpoint is the run that never stopped."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.integration.process import SCRIPTS, run


@pytest.mark.slow
def test_resumed_is_uninterrupted(tmp_path, device):
    whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    script = SCRIPTS / 'train_with_trainer.py'
    run('-m', 'fla_longhorn', script, whole, device, cwd=tmp_path)
    resumed.mkdir()
    shutil.copytree(whole / 'checkpoint-4', resumed / 'checkpoint-4')
    run('-m', 'fla_longhorn', script, resumed, device, cwd=tmp_path)
    losses = [json.loads((folder / 'losses.json').read_text()) for folder in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert losses[0][-1] < 0.8 * losses[0][0]
    weights = [load_file(folder / 'final' / 'model.safetensors') for folder in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert weight.equal(weights[1][name]), name
