"""The layer as a mixer in zoology's blocks, which import, build and weigh it by a string."""

import pkgutil

import pytest
import torch

from fla_longhorn.layers import Longhorn


@pytest.mark.parametrize('options', [{}, {'exact': True}], ids=str)
def test_the_mixer_is_the_layer(options, device):
    build = pkgutil.resolve_name('fla_longhorn_extras.zoology:LonghornMixer')
    mixer = build(d_model=32, layer_idx=1, state_size=8, **options)
    layer = Longhorn(hidden_size=32, layer_idx=1, state_size=8, **options)
    layer.load_state_dict(mixer.mixer.state_dict())
    h = torch.randn(2, 9, 32)
    torch.testing.assert_close(mixer.to(device)(h.to(device)), layer.to(device)(h.to(device))[0], rtol=0, atol=0)
    assert mixer.state_size(sequence_length=9) == 64 * 8
