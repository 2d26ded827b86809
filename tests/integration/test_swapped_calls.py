"""Calls of fla's families with Longhorn as their mixer: packed documents, looking ahead, what is refused."""

import copy

import pytest
import torch

from tests.integration.swapped import families, make_model, spread, tokens
from tests.models.test_boundaries import NAMES, collated
from tests.models.test_cache import contents, equal

LENGTHS = [5, 1, 66, 3]
HYBRID = {'layers': [0], 'num_heads': 2, 'window_size': 8}


def tolerance(family: str) -> float:
    # Rodimus+ computes its shared-key attention in bfloat16
    return 1e-2 if family == 'rodimus' else 1e-5


@families
@pytest.mark.parametrize('hybrid', [False, True], ids=['', 'hybrid'])
def test_documents_one_by_one(family, hybrid, device):
    """By every name that transformers' collator has for boundaries; TRL's are all of them together."""
    model = spread(make_model(family, device, **({'attn': HYBRID} if hybrid else {}))).eval()
    rows = tokens('cpu', sum(LENGTHS)).split(LENGTHS)
    with torch.no_grad():
        apart = torch.cat([model(row[None].to(device), use_cache=False).logits for row in rows], 1)
        for options in NAMES.values():
            batch = collated([{'input_ids': row} for row in rows], device, **options)
            batch.pop('labels')
            logits = model(**batch, use_cache=False).logits
            assert (logits - apart).norm() <= tolerance(family) * apart.norm()
        bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
        logits = model(batch['input_ids'], cu_seqlens=bounds, use_cache=False).logits
        assert (logits - apart).norm() <= tolerance(family) * apart.norm()
        base = model.model(**batch, use_cache=False)[0]
        assert (model.lm_head(base) - apart).norm() <= tolerance(family) * apart.norm()


@families
@pytest.mark.parametrize('hybrid', [False, True], ids=['', 'hybrid'])
@torch.no_grad()
def test_a_look_ahead_changes_nothing(family, hybrid, device):
    model = spread(make_model(family, device, **({'attn': HYBRID} if hybrid else {}))).eval()
    ids = tokens(device, 2, 10)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    before = contents(cache)
    first, again = (model(ids[:, 9:], past_key_values=cache, use_cache=False) for _ in range(2))
    assert first.past_key_values is cache and torch.equal(first.logits, again.logits)
    assert model(ids[:, 9:], past_key_values=cache, use_cache=False, return_dict=False)[1] is cache
    assert equal(contents(cache), before)
    then = model(ids[:, 9:], past_key_values=cache, use_cache=True).logits
    assert (then - first.logits).norm() <= 1e-6 * then.norm()
    assert cache.get_seq_length() == 10


@families
def test_refused(family, device):
    model, ids = make_model(family, device).eval(), tokens(device, 2, 9)
    for name, x, kind, message in (
        ('cu_seqlen', torch.tensor([0, 9]), TypeError, "Model.forward got an unexpected keyword argument 'cu_seqlen'"),
        ('attention_mask', torch.ones(2, 8), ValueError, r'attention_mask must have shape .*\[2, 8\]'),
        ('attention_mask', torch.ones(1, 9), ValueError, r'attention_mask must have shape .*\[1, 9\]'),
        ('position_ids', torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), ValueError, 'position_ids .* B = 1, got B = 2'),
    ):
        with pytest.raises(kind, match=message):
            model(ids, **{name: x.to(device)})


def test_cache_of_another_model(device):
    cache = make_model('gla', device).eval()(tokens(device, 2, 9), use_cache=True).past_key_values
    other = make_model('gla', device, longhorn_state_size=5).eval()
    with pytest.raises(ValueError, match='past_key_values must hold a recurrent_state of shape'):
        other(tokens(device, 2, 1), past_key_values=cache)
    del cache.layers[1]
    with pytest.raises(ValueError, match='past_key_values must hold the states of 2 layers, got 1'):
        make_model('gla', device).eval()(tokens(device, 2, 1), past_key_values=cache)


def test_copied(device):
    model, ids = copy.deepcopy(make_model('gla', device)).eval(), tokens(device, 1, 5)
    positions, bounds = torch.tensor([[0, 1, 0, 1, 2]], device=device), torch.tensor([0, 2, 5], device=device)
    assert torch.equal(model(ids, position_ids=positions).logits, model(ids, cu_seqlens=bounds).logits)
