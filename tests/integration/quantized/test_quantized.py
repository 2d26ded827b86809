"""Models whose weights torchao or bitsandbytes quantised: the logits and LoRA gradients of the same weights in float32."""

import copy

import bitsandbytes
import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.integration.test_adapters import inputs, make, models

# a Linear4bit of these is too small for bitsandbytes on CPUs with AVX-512
TOO_SMALL = ['x_proj', 'beta_proj']


def is_quantized(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter


def dequantized(model: nn.Module, original: nn.Module) -> nn.Module:
    expected = copy.deepcopy(original)
    for name, module in model.named_modules():
        if is_quantized(module):
            weight = module.weight
            full = (
                bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
                if isinstance(weight, bitsandbytes.nn.Params4bit) else weight.dequantize()
            )
            expected.get_submodule(name).weight = nn.Parameter(full.detach().clone())
    return expected


def lora_gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of adapters on the mixers' outputs: the other projections keep their class, and gradients pass through them."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=['out_proj'], init_lora_weights=False)).train()
    model(ids, labels=ids).loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


def check_gradients(model: nn.Module, expected: nn.Module, ids: torch.Tensor) -> None:
    found, exact = lora_gradients(model, ids), lora_gradients(expected, ids)
    assert found and found.keys() == exact.keys()
    for name, x in exact.items():
        assert x.any() and (found[name] - x).norm() <= 1e-3 * x.norm(), name


@models
def test_torchao(name, device):
    original, ids = make(name, device), inputs(device)
    model = copy.deepcopy(original)
    # a head may share its weight with the embeddings
    quantize_(model, Int8WeightOnlyConfig(), lambda x, name: isinstance(x, nn.Linear) and not name.endswith('lm_head'))
    assert sum(map(is_quantized, model.modules())) > 4
    expected = dequantized(model, original)
    with torch.no_grad():
        before, after, exact = (x.eval()(ids).logits for x in (original, model, expected))
    assert (after - exact).norm() <= 1e-5 * exact.norm() < (after - before).norm()
    check_gradients(model, expected, ids)


@pytest.mark.parametrize('name', ['mlp', 'gla'])
def test_bitsandbytes(name, tmp_path, device):
    """QLoRA, with a base model that transformers loads in four bits."""
    original, ids = make(name, device), inputs(device)
    original.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=[*TOO_SMALL, 'lm_head'],
        ),
    )
    assert sum(map(is_quantized, model.modules())) > 4
    check_gradients(model, dequantized(model, original), ids)
