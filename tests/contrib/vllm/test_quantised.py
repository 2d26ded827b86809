"""A checkpoint of compressed-tensors, with weights and inputs of 8 bits, compared with transformers where both are rounded."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.contrib.vllm.checkpoints import NEW_TOKENS, log_probabilities, make, prompts

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


@pytest.mark.parametrize('name', ['paper', 'hybrid'])
def test_log_probabilities(engine, tmp_path, name):
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

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    requests = [{'prompt_token_ids': x} for x in prompts()]
    outputs = [x.outputs[0] for x in engine(tmp_path).generate(requests, sampling, use_tqdm=False)]
    tokens = [list(x.token_ids) for x in outputs]
    served = torch.tensor([
        [step[token].logprob for step, token in zip(x.logprobs, some, strict=True)]
        for x, some in zip(outputs, tokens, strict=True)
    ])

    def of(model) -> torch.Tensor:
        return torch.stack([log_probabilities(model, *pair) for pair in zip(prompts(), tokens, strict=True)])

    of_rounded, of_float = of(rounded), of(checkpoint.model)
    assert (served - of_rounded).norm() < 0.1 * (of_rounded - of_float).norm()
