"""transformers' Trainer decays the matrices and nothing else: not `D`, nor norms, nor biases."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from tests.integration.process import SCRIPTS, run


@pytest.mark.slow
def test_groups(tmp_path):
    """Whichever is imported first, the plugin or the Trainer; other models' groups are what they are without the plugin."""
    found, again, without = (
        json.loads(run(SCRIPTS / 'trainer_groups.py', order, cwd=tmp_path))
        for order in ('trainer first', 'trainer last', 'without')
    )
    assert found == again and without == {'stock gla': found['stock gla']}
    for name in ('longhorn', 'gla'):
        assert any(x.endswith('attn.D') for x in found[name])
        assert {x: decayed for x, (decayed, _) in found[name].items()} == {x: dim > 1 for x, (_, dim) in found[name].items()}


def test_a_step_without_gradient_leaves_it(tmp_path, device):
    """The Trainer's own AdamW: where the gradient is zero, decay is all that moves a weight."""
    config = AutoConfig.for_model('longhorn', hidden_size=32, num_hidden_layers=1, vocab_size=32)
    model = AutoModelForCausalLM.from_config(config).to(device)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    args = TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.5, learning_rate=0.1, use_cpu=device.type == 'cpu', report_to='none',
    )
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    optimizer.step()
    moved = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert moved == {name for name, x in before.items() if x.dim() > 1}
