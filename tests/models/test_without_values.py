"""Fake tensors and the meta device, which estimate memory and shapes: a training step and decoding as with values."""

from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fla_longhorn import LonghornForCausalLM
from tests.devices import slow_but
from tests.models.test_cache import small

WHERE = {'fake': FakeTensorMode, 'meta': lambda: torch.device('meta')}
OPTIONS = {
    'diagonal': {}, 'exact': {'exact': True, 'num_heads': 2}, 'gate': {'gate': 'channel'}, 'recomputed': {'recompute': True},
    'attention': {'attn': {'layers': [1], 'num_heads': 2}},
    'window': {'attn': {'layers': [1], 'num_heads': 2, 'window_size': 4}},
}


CALLS = {'whole': 'fake', 'mask': 'meta', 'decode': 'meta', 'decode-mask': 'fake'}


@pytest.mark.parametrize(('call', 'where'), slow_but(CALLS.items(), product(CALLS, WHERE)))
@pytest.mark.parametrize('options', OPTIONS.values(), ids=OPTIONS)
def test_shapes(options, call, where):
    with WHERE[where]():
        model, ids = LonghornForCausalLM(small(**options)), torch.zeros(2, 9, dtype=torch.long)
        mask = torch.ones_like(ids) if 'mask' in call else None
        if 'decode' in call:
            with torch.no_grad():
                cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
                mask = torch.ones(2, 10, dtype=torch.long) if 'mask' in call else None
                out = model(ids[:, :1], attention_mask=mask, past_key_values=cache)
            assert out.logits.shape == (2, 1, 53)
            return
        model.train()(ids, labels=ids, attention_mask=mask).loss.backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize('where', WHERE.values(), ids=WHERE)
@pytest.mark.parametrize('options', [{}, OPTIONS['attention']], ids=['diagonal', 'attention'])
def test_boundaries_are_refused_by_name(options, where):
    with where(), pytest.raises(ValueError, match='cu_seqlens must have values, got a fake or meta tensor'):
        LonghornForCausalLM(small(**options))(torch.zeros(1, 9, dtype=torch.long), cu_seqlens=torch.tensor([0, 4, 9]))
