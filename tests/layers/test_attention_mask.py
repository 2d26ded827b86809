"""Which masks the layer and the models take, and what they say of the others, in a trace too."""

import pytest
import torch
from fla.models.utils import Cache

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from fla_longhorn.modules.attention import RowwiseAttention
from tests.models.test_cache import make, near
from tests.models.test_longhorn import small

BAD = {
    'short': (torch.ones(2, 8), r'attention_mask must have shape \[2, 9\].*, got \[2, 8\]'),
    'one row': (torch.ones(1, 9), r'attention_mask must have shape \[2, 9\].*, got \[1, 9\]'),
    'rows': (torch.ones(3, 9), r'attention_mask must have shape \[2, 9\].*, got \[3, 9\]'),
    'long': (torch.ones(2, 14), r'attention_mask must have shape \[2, 9\].* and no more, got \[2, 14\]'),
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


@pytest.mark.parametrize('later', [0, 1])
@pytest.mark.parametrize('how', ['model', 'compiled', 'generate'])
@pytest.mark.parametrize('name', ['paper', 'hybrid', 'gla'])
@torch.no_grad()
def test_columns_for_tokens_to_come(name, how, later, device):
    """A mask of the final length, which other libraries take: it does not say which of its columns are of these tokens."""
    model, ids = make(name, device), torch.randint(3, 50, (2, 6), device=device)
    mask = torch.full((2, 20), later, device=device)
    mask[:, :9], mask[0, :2] = 1, 0
    if how == 'generate':
        with pytest.raises(ValueError, match=r'attention_mask must have shape \[2, 6\], .* and no more, got \[2, 20\]'):
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        return
    call = torch.compile(model, backend='eager') if how == 'compiled' else model
    with pytest.raises(ValueError, match=r'attention_mask must have shape \[2, 6\], .* and no more, got \[2, 20\]'):
        call(ids, mask)
    cache = model(ids, mask[:, :6], use_cache=True).past_key_values
    for T in (1, 3):
        new = ids[:, :T]
        for columns in (T + 7, 20):
            with pytest.raises(ValueError, match=rf'{T + 6}\], .* the 6 that past_key_values .*, got \[2, {columns}\]'):
                call(new, mask[:, :columns], past_key_values=cache, use_cache=True)
        assert all(cache.get_seq_length(i) == 6 for i in range(len(cache)))
        want = model(new, mask[:, :T + 6], past_key_values=cache, use_cache=False).logits
        if name != 'hybrid':
            # the columns of what was read may be left out
            assert near(model(new, mask[:, 6:T + 6], past_key_values=cache, use_cache=False).logits, want)


@pytest.mark.parametrize('make_layer', [
    lambda: Longhorn(hidden_size=24, state_size=4, layer_idx=0), lambda: RowwiseAttention(24, num_heads=2, layer_idx=0),
], ids=['longhorn', 'attention'])
@torch.no_grad()
def test_columns_of_a_layer(make_layer, device):
    """It takes those of its tokens, and also of those that its cache has read; the last are of its tokens."""
    layer, h, cache = make_layer().to(device), torch.randn(2, 9, 24, device=device), Cache()
    mask = torch.ones(2, 9, dtype=torch.long, device=device)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match=r'attention_mask must have shape \[2, 5\], .*got \[2, 9\]'):
        layer(h[:, :5], mask)
    layer(h[:, :5], mask[:, :5], cache, use_cache=True)
    with pytest.raises(ValueError, match=r'attention_mask must have shape \[2, 3\] to \[2, 8\], .*got \[2, 9\]'):
        layer(h[:, 5:8], mask, cache)
    want = layer(h[:, :8], mask[:, :8])[0][:, 5:]
    assert near(layer(h[:, 5:8], mask[:, :8], cache)[0], want)
    assert near(layer(h[:, 5:8], mask[:, 5:8], cache)[0], want)
