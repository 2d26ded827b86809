"""Options of the layer, by themselves and in a config: an error that names the option, what it got and what it takes."""

import json

import numpy as np
import pytest
from transformers import AutoConfig, GenerationConfig

from fla_longhorn import LonghornConfig
from fla_longhorn.layers import Longhorn

BAD = [
    ({'mode': 'fused_chunk'}, ValueError, r"mode must be one of \['chunk', 'fused_recurrent'\], got 'fused_chunk'"),
    ({'hidden_size': 24.0}, TypeError, 'hidden_size must be an integer, got 24.0'),
    ({'hidden_size': 0}, ValueError, 'hidden_size must be at least 1, got 0'),
    ({'state_size': 257}, ValueError, 'state_size must be between 1 and 256, got 257'),
    ({'state_size': 2.5}, TypeError, 'state_size must be an integer, got 2.5'),
    ({'expand': 1.01}, ValueError, r'expand \* hidden_size must be a positive integer, got 1.01 \* 24'),
    ({'expand': '2'}, TypeError, "expand must be a number, got '2'"),
    ({'expand': True}, TypeError, 'expand must be a number, got True'),
    ({'expand': -2}, ValueError, 'expand must be positive and finite, got -2'),
    ({'expand': float('inf')}, ValueError, 'expand must be positive and finite, got inf'),
    ({'expand': float('nan')}, ValueError, 'expand must be positive and finite, got nan'),
    ({'num_heads': 5}, ValueError, r'num_heads must divide expand \* hidden_size = 48, got 5'),
    ({'num_heads': True}, TypeError, 'num_heads must be an integer, got True'),
    ({'num_heads': 0}, ValueError, 'num_heads must be at least 1, got 0'),
    ({'conv_size': 0}, ValueError, 'conv_size must be at least 1, got 0'),
    ({'conv_bias': 1}, TypeError, 'conv_bias must be True or False, got 1'),
    ({'use_bias': None}, TypeError, 'use_bias must be True or False, got None'),
    ({'exact': 1}, TypeError, 'exact must be True or False, got 1'),
    ({'scalar_beta': 'x'}, TypeError, "scalar_beta must be True or False, got 'x'"),
    ({'beta_rank': 0}, ValueError, "beta_rank must be 'auto' or a positive integer, got 0"),
    ({'beta_rank': True}, ValueError, "beta_rank must be 'auto' or a positive integer, got True"),
    ({'k_norm': 'sum'}, ValueError, "k_norm must be None or 'l2', got 'sum'"),
    ({'allow_neg_eigval': 'x'}, TypeError, "allow_neg_eigval must be True or False, got 'x'"),
    ({'gate': 'key'}, ValueError, "gate must be None, 'head' or 'channel', got 'key'"),
    ({'tie_qk': 1}, TypeError, 'tie_qk must be True or False, got 1'),
    ({'value_proj': 'yes'}, TypeError, "value_proj must be True or False, got 'yes'"),
    ({'norm_eps': 0}, ValueError, 'norm_eps must be positive and finite, got 0'),
]


@pytest.mark.parametrize('options, kind, message', [
    *BAD,
    ({'layer_idx': -1}, ValueError, 'layer_idx must be at least 0, got -1'),
    ({'layer_idx': 0.0}, TypeError, 'layer_idx must be an integer, got 0.0'),
], ids=str)
def test_layer(options, kind, message):
    with pytest.raises(kind, match=message):
        Longhorn(**{'hidden_size': 24, **options})


@pytest.mark.parametrize('options, kind, message', [
    *BAD,
    ({'num_hidden_layers': 0}, ValueError, 'num_hidden_layers must be at least 1, got 0'),
    ({'vocab_size': 1e5}, TypeError, 'vocab_size must be an integer, got 100000.0'),
    ({'hidden_ratio': '4'}, TypeError, "hidden_ratio must be a number, got '4'"),
    ({'intermediate_size': 0}, ValueError, 'intermediate_size must be at least 1, got 0'),
], ids=str)
def test_config(options, kind, message, tmp_path):
    """Built by hand, or read from a file that somebody wrote."""
    options = {'attn_mode' if name == 'mode' else name: value for name, value in options.items()}
    with pytest.raises(kind, match=message):
        LonghornConfig(**{'hidden_size': 24, **options})
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'longhorn', 'hidden_size': 24, **options}))
    with pytest.raises(kind, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize('name, meant', [
    ('exakt', 'exact'), ('state_dim', 'state_size'), ('allow_negative_eigval', 'allow_neg_eigval'), ('knorm', 'k_norm'),
    ('num_layers', 'num_hidden_layers'), ('Exact', 'exact'), ('fuse_crossentropy', 'fuse_cross_entropy'),
    ('K', 'state_size'),
])
def test_a_misspelt_option_of_a_config(name, meant, tmp_path):
    with pytest.raises(TypeError, match=f"LonghornConfig got an unexpected keyword argument '{name}': did you mean '{meant}'"):
        LonghornConfig(**{name: 1})
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'longhorn', name: 1}))
    with pytest.raises(TypeError, match=name):
        AutoConfig.from_pretrained(tmp_path)


def test_other_keys_of_a_config(tmp_path):
    """transformers' own, also those of generation, and a user's stay, in files too."""
    others = {name: value for name, value in GenerationConfig(num_beams=2).to_dict().items() if value is not None}
    keys = {
        **others, 'torch_dtype': 'float32', 'num_labels': 3, 'sep_token_id': 4, 'original_vocab_size': 7, 'run': 'a',
        'dataset': 'text', 'layer_norm_eps': 1e-6, 'attn_implementation': 'eager', 'quantization': {'bits': 8}, 'n_layer': 2,
    }
    config = LonghornConfig(hidden_size=24, **keys)
    assert config.original_vocab_size == 7 and config.run == 'a'
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.original_vocab_size == 7 and again.to_diff_dict() == config.to_diff_dict()


def test_integers_of_numpy():
    layer = Longhorn(hidden_size=np.int64(24), state_size=np.int32(4), expand=np.float32(2), layer_idx=np.int64(0))
    assert (layer.intermediate_size, layer.state_size) == (48, 4)


def test_doubled_steps_of_normalised_keys_warn():
    """They never turn anything: a step of `|k| = 1` is at most one half."""
    with pytest.warns(UserWarning, match="allow_neg_eigval gives no negative eigenvalue with k_norm='l2'"):
        Longhorn(hidden_size=24, k_norm='l2', allow_neg_eigval=True)
