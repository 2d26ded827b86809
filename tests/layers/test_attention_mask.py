"""Which masks the layer and the models take, and what they say of the others, in a trace too."""

import pytest
import torch

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from tests.models.test_longhorn import small

BAD = {
    'short': (torch.ones(2, 8), r'attention_mask must have shape \[B, >= T\] = \[2, >= 9\], got \[2, 8\]'),
    'one row': (torch.ones(1, 9), r'attention_mask must have shape \[B, >= T\] = \[2, >= 9\], got \[1, 9\]'),
    'rows': (torch.ones(3, 9), r'attention_mask must have shape \[B, >= T\] = \[2, >= 9\], got \[3, 9\]'),
    '4-D': (torch.ones(2, 1, 9, 9), r'attention_mask must be a 0-1 padding mask .*got shape \[2, 1, 9, 9\]'),
    '1-D': (torch.ones(9), r'attention_mask must be a 0-1 padding mask .*got shape \[9\]'),
    'numbers of documents': (torch.tensor([[1] * 4 + [2] * 5] * 2), 'must hold 0 for padding and 1 for tokens, got 2'),
    'additive': (torch.zeros(2, 9).index_fill(1, torch.tensor([0]), float('-inf')), 'must hold 0 .* 1 .*, got -inf'),
    'halves': (torch.full((2, 9), 0.5), 'must hold 0 for padding and 1 for tokens, got 0.5'),
}


@pytest.fixture
def layer(device) -> Longhorn:
    return Longhorn(hidden_size=24, state_size=4, layer_idx=0).to(device)


@pytest.mark.parametrize('name', list(BAD))
def test_refused(layer, name, device):
    """By the base model before a layer has changed the cache."""
    mask, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(2, 9, 24, device=device), mask.to(device))
    model = LonghornForCausalLM(small()).to(device).eval()
    cache = model(torch.ones(2, 4, dtype=torch.long, device=device), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 9, dtype=torch.long, device=device), mask.to(device), past_key_values=cache)
    assert all(cache.get_seq_length(i) == 4 for i in range(3))


def test_a_list_is_refused(layer, device):
    with pytest.raises(TypeError, match='attention_mask must be a torch.Tensor or None, got list'):
        layer(torch.randn(2, 9, 24, device=device), [[1] * 9] * 2)


def test_on_another_device(layer, device):
    h, elsewhere = torch.randn(2, 9, 24, device=device), 'meta' if device.type == 'cpu' else 'cpu'
    mask = torch.ones(2, 9, device=elsewhere)
    with pytest.raises(ValueError, match=f'attention_mask must be on the device of the input .*, got {elsewhere}'):
        layer(h, mask)
    with pytest.raises(ValueError, match=f'attention_mask must be on the device of the input .*, got {elsewhere}'):
        LonghornForCausalLM(small()).to(device)(torch.ones(2, 9, dtype=torch.long, device=device), mask)
    bounds = torch.tensor([0, 9], device=elsewhere)
    with pytest.raises(ValueError, match=f'cu_seqlens must be on the device of q .*, got {elsewhere}'):
        layer(h[:1], cu_seqlens=bounds)


@pytest.mark.parametrize('columns', [1, 4, 6])
def test_mask_of_attention_layers_covers_the_cache(columns, device):
    model = LonghornForCausalLM(small(attn={'layers': [2], 'num_heads': 2})).to(device).eval()
    ids = torch.ones(2, 4, dtype=torch.long, device=device)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=rf'attention_mask must have shape \[2, 5\], .*got \[2, {columns}\]'):
        model(ids[:, :1], torch.ones(2, columns, device=device), past_key_values=cache)
    model(ids[:, :1], torch.ones(2, 5, device=device), past_key_values=cache)
