"""torch's defaults change nothing in a model: neither its loss, nor gradients, nor the tokens that it generates.

Lightning's and Fabric's `bf16-true` convert the module and set the default dtype around its forward, not around backward.
"""

from contextlib import nullcontext

import pytest
import torch

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.ops import operator
from tests.models.test_longhorn import VARIANTS, small
from tests.ops.test_defaults import DEFAULTS


def results(model, ids, default):
    """Loss and gradients, then a prompt's logits and states, those of the next token, and greedy tokens."""
    model.zero_grad()
    with default():
        loss = model(ids, labels=ids, cu_seqlens=None).loss
    loss.backward()
    found = [loss.detach(), *(x.grad.clone() for x in model.parameters())]
    model.eval()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad(), default():
        for given in (None, mask):
            prompt = model(ids, attention_mask=given, use_cache=True)
            cache = prompt.past_key_values
            found += [prompt.logits, model(ids[:, :1], past_key_values=cache, use_cache=True).logits]
            found += [x.clone() for layer in cache for x in layer.values() if isinstance(x, torch.Tensor)]
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))
    model.train()
    return found


@pytest.mark.usefixtures('poison')
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize('options', [*VARIANTS.values(), {'attn': {'layers': [1], 'num_heads': 2}}], ids=str)
def test_defaults_change_nothing(options, dtype, device, monkeypatch):
    """Step by step: under a default device no call is plain, so that none takes the loop for a token, which adds otherwise."""
    monkeypatch.setattr(operator, 'find_token_loops', None)
    model = LonghornForCausalLM(small(**options)).to(device, dtype).train()
    ids = torch.randint(1, 53, (2, 40), device=device)
    expected = results(model, ids, nullcontext)
    assert all(torch.isfinite(x).all() for x in expected)
    for default in DEFAULTS:
        got = results(model, ids, default)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.device == b.device
            assert torch.equal(a, b)
