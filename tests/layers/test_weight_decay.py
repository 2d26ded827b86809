"""`D._no_weight_decay`, by which training code of the Mamba family leaves a parameter out of weight decay, is never lost."""

import copy
import io

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from tests.models.test_longhorn import small


def saved(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def on_meta(layer: nn.Module) -> nn.Module:
    with torch.device('meta'):
        empty = Longhorn(hidden_size=24)
    return empty.to_empty(device=layer.D.device)


def assigned(layer: nn.Module) -> nn.Module:
    state = {name: x.detach().clone() for name, x in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.D.data_ptr() == state['D'].data_ptr()
    return layer


def replaced(layer: nn.Module) -> nn.Module:
    layer.D = nn.Parameter(torch.ones_like(layer.D))
    return layer


WAYS = {
    'fresh': lambda layer: layer, 'deepcopy': copy.deepcopy, 'saved': saved, 'to_empty': on_meta,
    'double': lambda layer: layer.to(torch.float64), 'assigned': assigned, 'replaced': replaced,
}


@pytest.mark.parametrize('way', list(WAYS))
def test_layer(way, device):
    layer = WAYS[way](Longhorn(hidden_size=24).to(device))
    assert layer.D._no_weight_decay is True
    assert [name for name, x in layer.named_parameters() if hasattr(x, '_no_weight_decay')] == ['D']
    assert 'D' in layer.state_dict()


@pytest.mark.parametrize('way', ['from_pretrained', 'init_weights'])
def test_model(way, tmp_path, device):
    if way == 'from_pretrained':
        LonghornForCausalLM(small()).save_pretrained(tmp_path)
        model = LonghornForCausalLM.from_pretrained(tmp_path, device_map=device)
    else:
        with torch.device('meta'):
            model = LonghornForCausalLM(small())
        model.to_empty(device=device)
        model.init_weights()
    assert all(layer.attn.D._no_weight_decay for layer in model.model.layers)


def test_names_hold_after_fully_shard(tmp_path):
    """FSDP2 makes new parameters, without the attribute."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = LonghornForCausalLM(small())
        fully_shard(model, mesh=init_device_mesh('cpu', (1,)))
        names = {name for name, x in model.named_parameters() if name.endswith('.D')}
        assert len(names) == len(model.model.layers) and model.no_weight_decay() == names
        decayed = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True)).get_decay_parameter_names(model)
        assert decayed and not names & set(decayed)
    finally:
        torch.distributed.destroy_process_group()
