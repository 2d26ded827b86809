"""The layer and fla's cache: what may change in it, what it may hold, and in which of PyTorch's modes."""

import copy

import pytest
import torch
from fla.models.utils import Cache

from fla_longhorn.layers import Longhorn
from fla_longhorn.selfcheck.compare import relative_error
from tests.layers.test_longhorn import build


def filled(layer: Longhorn, h: torch.Tensor, mask: torch.Tensor | None = None) -> Cache:
    cache = Cache()
    with torch.no_grad():
        layer(h, mask, cache, use_cache=True)
    return cache


def test_a_look_ahead_at_one_token_a_sequence(device):
    """Packed, where fla's convolution takes its update in place."""
    layer, h = build(device), torch.randn(2, 8, 24, device=device)
    cache = filled(layer, h[:, :7])
    before = copy.deepcopy(dict(cache[0]))
    with torch.no_grad():
        o = layer(h[:, 7:].transpose(0, 1), past_key_values=cache, cu_seqlens=torch.tensor([0, 1, 2], device=device))[0]
    assert relative_error(o.transpose(0, 1), layer(h)[0][:, 7:]) < 1e-5
    assert all(torch.equal(cache[0][name], before[name]) for name in ('recurrent_state', 'conv_state'))


def test_decoding_leaves_states_with_a_graph_alone(device):
    layer, h, cache = build(device), torch.randn(2, 5, 24, device=device), Cache()
    layer(h[:, :4], past_key_values=cache, use_cache=True)
    states = [cache[0][name] for name in ('recurrent_state', 'conv_state')]
    before = [x.detach().clone() for x in states]
    with torch.no_grad():
        layer(h[:, 4:], past_key_values=cache, use_cache=True)
    assert all(torch.equal(x, y) for x, y in zip(states, before, strict=True))
    sum(x.square().sum() for x in states).backward()


MODES = {'inference': torch.inference_mode, 'no grad': torch.no_grad, 'grad': torch.enable_grad}


@pytest.mark.parametrize('then', list(MODES))
@pytest.mark.parametrize('first', list(MODES))
@pytest.mark.parametrize('T', [1, 5])
def test_modes_of_pytorch(first, then, T, device):
    """A cache that one mode filled serves every other one, with gradients where there are any."""
    layer, h = build(device), torch.randn(2, 8 + 2 * T, 24, device=device)
    cache, parts = Cache(), []
    for mode, part in ((first, h[:, :7]), (first, h[:, 7:8]), *((then, part) for part in h[:, 8:].split(T, 1))):
        with MODES[mode]():
            parts.append(layer(part, past_key_values=cache, use_cache=True)[0])
    assert relative_error(torch.cat([x.detach().clone() for x in parts], 1), layer(h)[0]) < 1e-5
    if then == 'grad':
        parts[-1].square().sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in layer.parameters())


def test_states_of_another_model(device):
    h, sizes = torch.randn(2, 5, 24, device=device), {'num_heads': 2}
    cache = filled(build(device, **sizes), h)
    for options, message in (
        ({'state_size': 5}, r'recurrent_state of shape \[2, 2, 5, 24\], one per sequence, in layer 0, got \[2, 2, 4, 24\]'),
        ({'num_heads': 4}, r'recurrent_state of shape \[2, 4, 4, 12\]'),
        ({'conv_size': 3}, r'conv_state of shape \[2, 48, 3\], one per sequence, in layer 0, got \[2, 48, 4\]'),
    ):
        with pytest.raises(ValueError, match='past_key_values must hold a ' + message):
            build(device, **sizes | options)(h, past_key_values=cache)
    with pytest.raises(ValueError, match=r'recurrent_state of shape \[1, 2, 4, 24\], .* got \[2, 2, 4, 24\]'):
        build(device, **sizes)(h[:1], past_key_values=cache)
