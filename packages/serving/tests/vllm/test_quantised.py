"""A checkpoint of compressed-tensors, with weights and inputs of 8 bits, compared with transformers where both are rounded."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from packages.serving.tests.checkpoints import all_log_probabilities, make, served_log_probabilities

ROUNDED = {'num_bits': 8, 'type': 'int', 'symmetric': True}
QUANTISED = {
    'quant_method': 'compressed-tensors', 'format': 'int-quantized', 'quantization_status': 'compressed',
    'ignore': ['lm_head'],
    'config_groups': {'group_0': {
        'targets': ['Linear'], 'weights': ROUNDED | {'strategy': 'channel', 'dynamic': False},
        'input_activations': ROUNDED | {'strategy': 'token', 'dynamic': True},
    }},
}


def quantise(x: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers up to `most`, and the scale of each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return (x / scale).round(), scale


@pytest.mark.parametrize(('name', 'options'), [('paper', {}), ('hybrid', {}), ('paper', {'enforce_eager': False})], ids=str)
def test_log_probabilities(engine, tmp_path, name, options):
    """Weights are at most 63: oneDNN adds two products of 8 bits in 16, which overflow on a CPU without VNNI."""
    checkpoint = make(name, tmp_path)
    rounded, weights = copy.deepcopy(checkpoint.model), load_file(tmp_path / 'model.safetensors')
    for path, layer in rounded.model.named_modules(prefix='model'):
        if isinstance(layer, torch.nn.Linear):
            integers, scale = quantise(layer.weight.data, 63)
            weights |= {f'{path}.weight': integers.to(torch.int8), f'{path}.weight_scale': scale}
            layer.weight.data = integers * scale
            layer.register_forward_pre_hook(lambda _, inputs: torch.mul(*quantise(inputs[0], 127)))
    save_file(weights, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(config | {'quantization_config': QUANTISED}))

    tokens, served = served_log_probabilities(engine(tmp_path, **options))
    of_rounded, of_float = (all_log_probabilities(model, tokens) for model in (rounded, checkpoint.model))
    assert (served - of_rounded).norm() < 0.1 * (of_rounded - of_float).norm()
