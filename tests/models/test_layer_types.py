"""`layer_types` of the config, as transformers' hybrid models have it."""

import pytest

from fla_longhorn import LonghornConfig, LonghornModel

LINEAR, FULL, SLIDING = 'linear_attention', 'full_attention', 'sliding_attention'


def make(**options) -> LonghornConfig:
    return LonghornConfig(hidden_size=16, num_hidden_layers=3, vocab_size=20, **options)


@pytest.mark.parametrize('attn, kinds', [
    (None, [LINEAR] * 3),
    ({'layers': [1], 'num_heads': 2}, [LINEAR, FULL, LINEAR]),
    ([{'layers': [0], 'num_heads': 2, 'window_size': 4}, {'layers': [2], 'num_heads': 2}], [SLIDING, LINEAR, FULL]),
])
def test_by_attn(attn, kinds):
    config = make(attn=attn)
    assert config.layer_types == kinds
    config.validate_layer_type()
    assert LonghornConfig.from_dict(config.to_dict()).layer_types == kinds
    assert make(attn=attn, layer_types=kinds).attn == config.attn


def test_given_to_from_pretrained(tmp_path):
    windows = [{'layers': [0], 'num_heads': 2, 'window_size': 4}, {'layers': [2], 'num_heads': 2, 'window_size': 6}]
    config = make(attn=windows)
    LonghornModel(config).save_pretrained(tmp_path)
    kinds = [SLIDING, LINEAR, SLIDING]
    assert LonghornModel.from_pretrained(tmp_path, layer_types=kinds).config.layer_types == kinds
    with pytest.raises(ValueError, match='layer_types must be those that attn'):
        LonghornModel.from_pretrained(tmp_path, layer_types=[LINEAR] * 3)
    with pytest.raises(ValueError, match='layer_types must be those that attn'):
        config.layer_types = [FULL] * 3


@pytest.mark.parametrize('kinds, window', [([FULL, LINEAR, FULL], None), ([LINEAR, SLIDING, LINEAR], 8)])
def test_says_the_layers_of_attn(kinds, window, device):
    config = make(attn={'num_heads': 2, 'window_size': window}, layer_types=kinds)
    assert config.attn['layers'] == [i for i, kind in enumerate(kinds) if kind != LINEAR]
    assert config.layer_types == kinds
    model = LonghornModel(config).to(device)
    assert [hasattr(block.attn, 'q_proj') for block in model.layers] == [kind != LINEAR for kind in kinds]


@pytest.mark.parametrize('options', [
    dict(layer_types=[LINEAR, FULL, LINEAR]),
    dict(layer_types=[LINEAR] * 2),
    dict(layer_types=['mamba'] * 3),
    dict(layer_types=[LINEAR, FULL, LINEAR], attn={'layers': [2], 'num_heads': 2}),
    dict(layer_types=[LINEAR, SLIDING, LINEAR], attn={'num_heads': 2}),
])
def test_contradictions(options):
    with pytest.raises(ValueError, match='layer_types must be those that attn = .* gives'):
        make(**options)
    with pytest.raises(TypeError, match='layer_types must be a list of str'):
        make(layer_types=LINEAR)
