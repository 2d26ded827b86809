"""transformers' Trainer decays the matrices of ours and nothing else: not `D`, nor norms, nor biases."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

FAMILIES = {
    'longhorn': {'hidden_ratio': 2, 'use_bias': True, 'attn': {'layers': [1], 'num_heads': 2}},
    'gla': {'attn_mode': 'longhorn', 'num_heads': 2},
}


@pytest.mark.parametrize('family', FAMILIES)
def test_a_step_without_gradient(family, tmp_path, device):
    """Where the gradient is zero, decay is all that moves a weight."""
    config = AutoConfig.for_model(family, hidden_size=32, num_hidden_layers=2, vocab_size=32, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).to(device)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1)
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
