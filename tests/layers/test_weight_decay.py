"""`_no_weight_decay`, by which training code of the Mamba family leaves a parameter out of weight decay, is never lost."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from tests.models.test_longhorn import small


def assigned(layer: nn.Module) -> nn.Module:
    state = {name: x.detach().clone() for name, x in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.D.data_ptr() == state['D'].data_ptr()
    return layer


def replaced(layer: nn.Module) -> nn.Module:
    layer.D = nn.Parameter(torch.ones_like(layer.D))
    return layer


WAYS = {
    'fresh': lambda layer: layer, 'deepcopy': copy.deepcopy, 'assigned': assigned, 'replaced': replaced,
}


@pytest.mark.parametrize('way', list(WAYS))
@pytest.mark.parametrize('gate', [None, 'head'])
def test_layer(way, gate, device):
    layer = WAYS[way](Longhorn(hidden_size=24, gate=gate).to(device))
    assert layer.D._no_weight_decay is True
    names = ['D'] if gate is None else ['D', 'gate.A_log', 'gate.dt_bias']
    assert [name for name, x in layer.named_parameters() if getattr(x, '_no_weight_decay', False)] == names
    assert 'D' in layer.state_dict()


@pytest.mark.parametrize('options', [
    {'model_type': 'longhorn', 'hidden_ratio': 2, 'use_bias': True, 'attn': {'layers': [1], 'num_heads': 2}},
    {'model_type': 'gla', 'attn_mode': 'longhorn', 'num_heads': 2},
    {'model_type': 'longhorn', 'gate': 'head', 'num_heads': 2, 'exact': True},
    {'model_type': 'longhorn', 'gate': 'channel'},
    {'model_type': 'gla', 'attn_mode': 'longhorn', 'num_heads': 2, 'longhorn_gate': 'channel'},
], ids=['longhorn', 'gla', 'gate of heads', 'gate of channels', 'gla with a gate'])
def test_trainer(options, tmp_path, device):
    """It decays the matrices and nothing else: neither `D`, nor norms, nor biases, nor `A_log` and `dt_bias`."""
    config = AutoConfig.for_model(**options, hidden_size=32, num_hidden_layers=2, vocab_size=32)
    model = AutoModelForCausalLM.from_config(config).to(device)
    args = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.5, use_cpu=device.type == 'cpu', report_to='none')
    groups = Trainer(model=model, args=args).create_optimizer().param_groups
    decayed = {id(x) for group in groups if group['weight_decay'] for x in group['params']}
    assert decayed == {id(x) for x in model.parameters() if x.dim() > 1}


def test_names_hold_after_fully_shard(tmp_path):
    """FSDP2 makes new parameters, without the attribute."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = LonghornForCausalLM(small(gate='channel'))
        fully_shard(model, mesh=init_device_mesh('cpu', (1,)))
        names = {name for name, x in model.named_parameters() if name.endswith(('.D', '.A_log', '.dt_bias'))}
        assert len(names) == 3 * len(model.model.layers) and model.no_weight_decay() == names
        decayed = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True)).get_decay_parameter_names(model)
        assert decayed and not names & set(decayed)
    finally:
        torch.distributed.destroy_process_group()
