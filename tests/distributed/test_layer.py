"""Context parallelism of the layer: four ranks against one, and the calls that it refuses."""

import pytest
import torch
from fla.models import GLAConfig
from transformers import AutoModelForCausalLM

from fla_longhorn import Longhorn, LonghornConfig
from fla_longhorn.modules.context_parallel import convolve_part
from tests import forks
from tests.distributed.test_op import context


def test_equals_one_rank():
    forks.output('-m', 'tests.distributed.scripts.layer')


@pytest.fixture
def layer(device):
    return Longhorn(hidden_size=16, layer_idx=0).to(device)


@pytest.fixture
def h(device):
    return torch.randn(1, 6, 16, device=device)


def test_without_a_group(layer, h, device):
    assert torch.equal(layer(h, cp_context=context(device))[0], layer(h, cu_seqlens=context(device).cu_seqlens)[0])


def test_a_context_without_tokens_to_look_back(layer, h, device):
    with pytest.raises(ValueError, match='cp_context must hold pre_num_conv_tokens'):
        convolve_part(layer.conv1d, torch.cat([h, h], -1), context(device, group='not asked'))


@pytest.mark.parametrize('change, error, message', [
    ({'use_cache': True}, ValueError, 'cp_context .*attention_mask must be None, and use_cache False'),
    ({'attention_mask': torch.ones(1, 6)}, ValueError, 'cp_context .*attention_mask must be None, and use_cache False'),
    ({'hidden_states': torch.randn(2, 6, 16)}, ValueError, 'cp_context.cu_seqlens packs all sequences into one row'),
    ({'cp_context': '2'}, TypeError, 'cp_context must be a fla.ops.cp.FLACPContext or None, got str'),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else '')
def test_bad_call(change, error, message, layer, h, device):
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(error, match=message):
        layer(**{'hidden_states': h, 'cp_context': context(device), **change})


@pytest.mark.parametrize(('kind', 'options'), [
    (LonghornConfig, {}), (GLAConfig, dict(attn_mode='longhorn', num_heads=2)),
], ids=['longhorn', 'gla'])
def test_attention_layers_are_refused(kind, options, device):
    config = kind(hidden_size=32, num_hidden_layers=2, vocab_size=20, attn={'layers': [1], 'num_heads': 2}, **options)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    with pytest.raises(ValueError, match='cp_context must be None with attention layers'):
        model(torch.randint(20, (1, 6), device=device), cp_context=context(device))
