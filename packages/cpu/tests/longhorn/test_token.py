"""Decoding: a token gets what a call without the short ways gives, and a layer's own methods are those that run."""

import pytest
import torch
from fla.models.utils import Cache
from torch.overrides import TorchFunctionMode

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import fused_recurrent_longhorn, operator
from tests.integration.swapped import make_model
from tests.models.test_cache import VARIANTS as HYBRIDS
from tests.models.test_longhorn import VARIANTS, small


def make(name: str, device, dtype=torch.float32):
    options = (VARIANTS | HYBRIDS).get(name)
    model = make_model(name, device) if options is None else LonghornForCausalLM(small(**options))
    return model.to(device, dtype).eval()


class Watching(TorchFunctionMode):
    """Changes nothing, but sees each function of PyTorch, so that no call below it is plain."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def continue_prompt(model, ids, mask):
    """Logits after a prompt, of tokens that are looked at, of tokens that are read, and of a piece; the states at the end."""
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    results = []
    for t in range(3):
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        for use_cache in (False, True):
            output = model(ids[:, t:t + 1], attention_mask=mask, past_key_values=cache, use_cache=use_cache)
            results.append(output.logits)
    results.append(model(ids[:, :1]).logits)
    assert cache.get_seq_length() == ids.shape[1] + 3
    return results + [x.clone() for layer in cache for x in (layer['recurrent_state'], layer['conv_state']) if x is not None]


@pytest.mark.parametrize('padding', [None, 'left'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', [*VARIANTS, 'hybrid', 'window', 'gla', 'gated_deltanet', 'hgrn2', 'rwkv7'])
@torch.no_grad()
def test_same_bits(name, dtype, padding, device, monkeypatch):
    """Without the loop for a token (`test_mixer.py`), whose products add in another order than PyTorch's."""
    monkeypatch.setattr(operator, 'find_token_loops', None)
    model, ids = make(name, device, dtype), torch.randint(3, 53, (3, 7), device=device)
    mask = None if padding is None else torch.ones_like(ids)
    if padding == 'left':
        mask[0, :3] = 0
    got = continue_prompt(model, ids, mask)
    with Watching():
        expected = continue_prompt(model, ids, mask)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


class Louder(Longhorn):
    """A subclass with other values, keys and updates."""

    def inputs(self, *args, **kwargs):
        inputs = super().inputs(*args, **kwargs)
        return {**inputs, 'v': 2 * inputs['v']}


class Swapped(Longhorn):
    def project(self, *args, **kwargs):
        q, k, *rest = super().project(*args, **kwargs)
        return k, q, *rest


class Other(Longhorn):
    def op_for(self, q_len):
        return lambda q, **kwargs: fused_recurrent_longhorn(3 * q, **kwargs)


@pytest.mark.parametrize('cls', [Louder, Swapped, Other])
@torch.no_grad()
def test_overridden_methods(cls, device):
    """Decoding by a subclass's own methods: what it gives for all tokens at once."""
    layer, h = cls(hidden_size=16, layer_idx=0).to(device), torch.randn(2, 6, 16, device=device)
    expected, base = layer(h)[0], Longhorn(hidden_size=16, layer_idx=0).to(device)
    base.load_state_dict(layer.state_dict())
    assert (expected - base(h)[0]).norm() > 1e-2 * expected.norm()
    cache = Cache()
    got = torch.cat([layer(h[:, t:t + 1], past_key_values=cache, use_cache=True)[0] for t in range(6)], 1)
    assert (got - expected).norm() < 1e-5 * expected.norm()


@torch.no_grad()
def test_parameters_that_are_no_parameters(device):
    """FSDP1 puts tensors in their place while a block runs."""
    model, ids = make('untied', device), torch.randint(3, 53, (3, 7), device=device)
    expected = continue_prompt(model, ids, None)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, parameter.detach())
    assert not list(model.parameters())
    got = continue_prompt(model, ids, None)
    assert all(map(torch.equal, got, expected))
