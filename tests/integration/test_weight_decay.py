"""transformers' Trainer decays the matrices of ours and nothing else: not `D`, nor norms, nor biases."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

FAMILIES = {
    'longhorn': {'hidden_ratio': 2, 'use_bias': True, 'attn': {'layers': [1], 'num_heads': 2}},
    'gla': {'attn_mode': 'longhorn', 'num_heads': 2},
}


@pytest.mark.parametrize('family', FAMILIES)
def test_matrices_alone_decay(family, tmp_path, device):
    config = AutoConfig.for_model(family, hidden_size=32, num_hidden_layers=2, vocab_size=32, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).to(device)
    args = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.5, use_cpu=device.type == 'cpu', report_to='none')
    groups = Trainer(model=model, args=args).create_optimizer().param_groups
    decayed = {id(x) for group in groups if group['weight_decay'] for x in group['params']}
    assert decayed == {id(x) for x in model.parameters() if x.dim() > 1}
