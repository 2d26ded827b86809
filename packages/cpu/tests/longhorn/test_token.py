"""Decoding: a token gets what a call without the short ways gives, and a layer's own methods are those that run."""

import pytest
import torch
from fla.models.utils import Cache

from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import fused_recurrent_longhorn


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
