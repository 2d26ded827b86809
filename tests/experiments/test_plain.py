"""The training curve of our model is that of a plain PyTorch model with the same weights and data."""

import json

import pytest
import torch
from transformers import set_seed

from experiments import mqar, plain

STEPS = 100
CELL = mqar.DEFAULTS | {
    'vocab_size': 16, 'seq_len': 16, 'num_pairs': 4, 'hidden_size': 16, 'num_hidden_layers': 2, 'state_size': 4, 'steps': 200,
    'batch_size': 8, 'warmup_steps': 20, 'learning_rate': 1e-2, 'eval_size': 16, 'test_size': 16, 'stop_patience': 0,
    'device': 'cpu', 'seed': 0,
}


def differences(losses, others):
    return [abs(x - y) for x, y in zip(losses, others, strict=True)]


@pytest.mark.parametrize('mixer', ['diagonal', pytest.param('exact', marks=pytest.mark.slow)])
def test_the_same_curve(mixer, tmp_path):
    """In float32 it is as far from plain PyTorch in float64 as plain PyTorch in float32 is: later steps amplify rounding."""
    found = plain.curves(CELL | {'mixer': mixer}, tmp_path, STEPS, (torch.float32, torch.float64))
    exact = found[torch.float64]
    assert len(exact) == STEPS and exact[-1] < 0.8 * exact[0]
    ours, rounding = (differences(found[name], exact) for name in ('ours', torch.float32))
    for n in (10, 30, 60, STEPS):
        assert max(ours[:n]) <= 4 * max(rounding[:n]) < 1e-2


@pytest.mark.parametrize('fault', ['step size', 'skip', 'data'])
def test_a_difference_shows(fault, tmp_path, monkeypatch):
    """Step sizes that are 1% smaller, a skip that does not learn, or other data."""
    if fault == 'step size':
        monkeypatch.setattr(plain.torch, 'sigmoid', lambda x: 0.99 * x.sigmoid())
    elif fault == 'skip':
        load = plain.PlainLonghorn.load_state_dict

        def frozen(self, weights):
            load(self, weights)
            for block in self.model['layers']:
                block.attn.D.requires_grad_(False)

        monkeypatch.setattr(plain.PlainLonghorn, 'load_state_dict', frozen)
    else:
        stream = plain.TrainingStream
        monkeypatch.setattr(plain, 'TrainingStream', lambda task, seed: stream(task, seed + 1))
    ours, other = plain.curves(CELL | {'mixer': 'diagonal'}, tmp_path, 40).values()
    assert max(differences(ours, other)) > 1e-4


def test_the_same_logits():
    """Of one block and several, at the weights that a model starts with."""
    for layers in (1, 3):
        set_seed(0)
        model = mqar.build_model(CELL | {'num_hidden_layers': layers}, mqar.MQAR(vocab_size=16, seq_len=16, num_pairs=4))
        other = plain.PlainLonghorn(model.config)
        other.load_state_dict(model.state_dict())
        ids = torch.randint(16, (3, 16))
        assert torch.allclose(model(ids).logits, other(ids), atol=1e-6)


def test_command(tmp_path, capsys):
    setting = {'options': {key: x for key, x in CELL.items() if key != 'mixer'}, 'grid': {'mixer': ['diagonal', 'exact']}}
    (tmp_path / 'tiny.json').write_text(json.dumps(setting))
    plain.main([str(tmp_path / 'tiny.json'), '--steps', '3', '--output_dir', str(tmp_path / 'out')])
    report = json.loads((tmp_path / 'out/results.json').read_text())
    assert len(report['ours']) == 3 and report['largest_difference'] < 1e-6
    assert '3 steps: the largest difference' in capsys.readouterr().out
