"""What SGLang's options ask for and the plugin does not have."""

from types import SimpleNamespace

import pytest

from fla_longhorn_serving.sglang import config, model


@pytest.mark.parametrize(('name', 'value'), [('tp_size', 2), ('pp_size', 2), ('speculative_algorithm', 'NGRAM')])
def test_options(monkeypatch, name, value):
    options = SimpleNamespace(**{'tp_size': 1, 'pp_size': 1, 'speculative_algorithm': None, name: value})
    for getter in ('get_parallel', 'get_spec'):
        monkeypatch.setattr(config, getter, lambda: options)
    with pytest.raises(ValueError, match=f'{name} must be .* got .*{value}'):
        _ = config.ServedConfig().mamba2_cache_params


def test_attention_layers():
    with pytest.raises(ValueError, match='attn must be None'):
        _ = config.ServedConfig(attn={'layers': [1], 'num_heads': 2}).mamba2_cache_params


def test_quantised_weights():
    with pytest.raises(ValueError, match="quantization must be None .* got fp8"):
        model.LonghornForCausalLM(config.ServedConfig(), SimpleNamespace(get_name=lambda: 'fp8'))
