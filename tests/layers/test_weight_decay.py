"""`D._no_weight_decay`, by which training code of the Mamba family leaves a parameter out of weight decay, is never lost."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn as nn

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
        layer = Longhorn(hidden_size=24)
    return layer.to_empty(device='cpu')


def assigned(layer: nn.Module) -> nn.Module:
    state = {name: x.detach().clone() for name, x in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.D.data_ptr() == state['D'].data_ptr()
    return layer


def replaced(layer: nn.Module) -> nn.Module:
    layer.D = nn.Parameter(torch.ones(48))
    return layer


WAYS = {
    'fresh': lambda layer: layer, 'deepcopy': copy.deepcopy, 'copy': copy.copy, 'saved': saved, 'to_empty': on_meta,
    'pickle': lambda layer: pickle.loads(pickle.dumps(layer)), 'double': lambda layer: layer.to(torch.float64),
    'assigned': assigned, 'replaced': replaced,
}


@pytest.mark.parametrize('way', list(WAYS))
def test_layer(way):
    layer = WAYS[way](Longhorn(hidden_size=24))
    assert layer.D._no_weight_decay is True
    assert [name for name, x in layer.named_parameters() if hasattr(x, '_no_weight_decay')] == ['D']
    assert 'D' in layer.state_dict()


@pytest.mark.parametrize('way', ['from_pretrained', 'init_weights', 'deepcopy'])
def test_model(way, tmp_path):
    model = LonghornForCausalLM(small())
    if way == 'from_pretrained':
        model.save_pretrained(tmp_path)
        model = LonghornForCausalLM.from_pretrained(tmp_path)
    elif way == 'init_weights':
        with torch.device('meta'):
            model = LonghornForCausalLM(small())
        model.to_empty(device='cpu')
        model.init_weights()
    else:
        model = copy.deepcopy(model)
    assert all(layer.attn.D._no_weight_decay for layer in model.model.layers)
