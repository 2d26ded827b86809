import inspect

import fla.models
import pytest
import torch
from fla.layers.gla import GatedLinearAttention
from fla.models.gla.modeling_gla import GLABlock
from fla.models.modeling_utils import FLAPreTrainedModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from fla_longhorn.attn_mode import FAMILIES, REFUSED
from fla_longhorn.attn_mode.config import mixer_options
from fla_longhorn.layers import Longhorn
from tests.integration.swapped import TINY, families, make_config, make_model, mixers


def test_options_reach_the_layer(device):
    options = dict(
        state_size=5, expand=1.5, num_heads=3, conv_size=3, conv_bias=False, beta_rank=2, use_bias=True, scalar_beta=True,
        mode='fused_recurrent', exact=True, allow_neg_eigval=True,
    )
    model = make_model('gla', device, expand_v=2, **{f'longhorn_{name}': value for name, value in options.items()})
    assert repr(mixers(model)[0]) == f'LonghornMixer{repr(Longhorn(hidden_size=64, **options, layer_idx=0))[8:]}'
    assert model.config.longhorn_expand == 1.5


@pytest.mark.parametrize(('family', 'options', 'want'), [
    ('gla', {}, dict(expand=1, num_heads=4)),
    ('gla', dict(expand_v=2, num_heads=8, conv_size=3), dict(expand=2, num_heads=8, conv_size=3)),
    ('retnet', {}, dict(expand=2, num_heads=8)),
    ('gated_deltanet', {}, dict(expand=1.5, num_heads=6)),
    ('gated_deltanet', dict(num_v_heads=12), dict(expand=3, num_heads=12)),
    ('kda', {}, dict(expand=1, num_heads=16)),
    ('cyclic_flow_attention', {}, dict(expand=1, num_heads=8, conv_bias=False)),
    ('hgrn', dict(expand_ratio=2), dict(expand=2, num_heads=1)),
    ('hgrn2', {}, dict(expand=1, num_heads=16)),
    ('lightnet', {}, dict(expand=1, num_heads=16)),
    ('lightnet', dict(num_heads=8, expand_ratio=None), dict(expand=1, num_heads=8)),
    ('rwkv7', dict(value_dim=4096), dict(expand=2, num_heads=32)),
    ('gated_deltanet', dict(longhorn_expand=1), dict(expand=1, num_heads=2)),
])
def test_defaults_fit_the_family(family, options, want):
    """As many channels and heads as the native mixer has; heads that would not divide the channels, fewer."""
    config = AutoConfig.for_model(family, attn_mode='longhorn', num_hidden_layers=1, vocab_size=8, **options)
    with torch.device('meta'):
        FLAPreTrainedModel(config)
    defaults = dict(state_size=16, conv_size=4, conv_bias=True)
    options = mixer_options(config)
    assert {name: options[name] for name in (defaults | want)} == defaults | want


@families
def test_as_many_channels_as_the_native_mixer(family):
    with torch.device('meta'):
        native = AutoModelForCausalLM.from_config(make_config(family, attn_mode='chunk'))
        swapped = AutoModelForCausalLM.from_config(make_config(family))
    ends = ('o_proj', 'out_proj', 'down_proj')
    (mixer, *_) = (x for x in native.modules() if type(x).__name__ == FAMILIES[family].native)
    channels = next(getattr(mixer, name).in_features for name in ends if hasattr(mixer, name))
    assert mixers(swapped)[0].intermediate_size == channels


@pytest.mark.parametrize(('family', 'options', 'message'), [
    ('gla', {'longhorn_hidden_size': 3}, 'got longhorn_hidden_size; the options of Longhorn are longhorn_mode, '),
    ('gla', {'longhorn': {'exact': True}}, 'GLAConfig got longhorn; the options of Longhorn are longhorn_mode, '),
    ('gla', {'longhon_exact': True}, 'GLAConfig got longhon_exact; the options of Longhorn are longhorn_mode, '),
    ('gla', {'lhonghorn_num_head': 2}, 'got lhonghorn_num_head;'),
    ('gla', {'longhorn_state_size': 0}, 'state_size must be between 1 and 256, got 0'),
    ('mom', {}, 'MomConfig: its mixer is a router.*comba.*gla.*rwkv7'),
    ('transformer', {}, 'TransformerConfig: it has no mixer.*comba.*gla.*rwkv7'),
    ('longhorn', {}, "mode must be one of .*got 'longhorn'"),
])
def test_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, attn_mode='longhorn', **TINY, **options))


def test_every_family_is_known():
    """What fla has with an `attn_mode`."""
    configs = (getattr(fla.models, name) for name in fla.models.__all__ if name.endswith('Config'))
    names = {
        config.model_type for config in configs
        if issubclass(config, PreTrainedConfig) and 'attn_mode' in inspect.signature(config.__init__).parameters
    }
    assert names - {'longhorn'} == FAMILIES.keys() | REFUSED.keys()


class TestConfigThatChanges:
    def test_a_block_without_a_model(self, device):
        """It prepares the config that it is built from, as a model does."""
        torch.manual_seed(0)
        config = make_config('gla', longhorn_state_size=8)
        block = GLABlock(config, 0).to(device)
        assert isinstance(block.attn, Longhorn) and block.attn.num_heads == 2
        x = torch.randn(2, 10, 64, device=device)
        assert block(x)[0].shape == x.shape
        with pytest.raises(ValueError, match='got longhorn_sate_size'):
            GLABlock(make_config('gla', longhorn_sate_size=3), 0)
        config.attn_mode = 'chunk'
        assert isinstance(GLABlock(config, 0).attn, GatedLinearAttention)

    def test_defaults_follow_the_family(self, tmp_path):
        """Also after loading; what the user sets stays."""
        config = make_config('gla', longhorn_state_size=8)
        model = AutoModelForCausalLM.from_config(config)
        assert mixers(model)[0].intermediate_size == 64
        model.save_pretrained(tmp_path)
        config.expand_v = 2
        for changed in (config, AutoConfig.from_pretrained(tmp_path, expand_v=2)):
            model = AutoModelForCausalLM.from_config(changed)
            assert mixers(model)[0].intermediate_size == 128 and mixers(model)[0].state_size == 8
        config = model.config
        config.longhorn_expand, config.expand_v, config.num_heads = 1.5, 1, 3
        model = AutoModelForCausalLM.from_config(config)
        assert mixers(model)[0].intermediate_size == 96 and mixers(model)[0].num_heads == 3

    def test_a_saved_default_stays(self, tmp_path, monkeypatch, device):
        """A default of the layer that changes in a later version is not that of a model that was trained before."""
        model = make_model('gla', device)
        model.save_pretrained(tmp_path)
        found = inspect.signature(Longhorn).parameters.items()
        later = tuple(32 if name == 'state_size' else x.default for name, x in found)
        monkeypatch.setattr(Longhorn.__init__, '__defaults__', later)
        assert mixers(AutoModelForCausalLM.from_pretrained(tmp_path))[0].state_size == 16
