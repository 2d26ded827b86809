"""`LonghornForCausalLM` under `torch.compile`: logits, losses and gradients in one graph, equal to eager."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn import LonghornForCausalLM
from tests.models.test_longhorn import small
from tests.torch_compile.graphs import assert_equal, cheap_kernels, compiled, gradients

LINEAR = {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True}
VARIANTS = {
    'paper': {},
    'mlp': {'hidden_ratio': 2, 'exact': True},
    'powlu': {'intermediate_size': 40, 'hidden_act': 'powlu', 'fuse_swiglu': False},
    'plain modules': {'fuse_norm': False, 'fuse_swiglu': False, 'fuse_cross_entropy': False, 'intermediate_size': 40},
    'linear loss': LINEAR,
    'untied': {'tie_word_embeddings': False, 'scalar_beta': True, 'num_heads': 2, 'use_bias': True},
    'l2warp': {'use_l2warp': True},
    'linear loss, l2warp': {**LINEAR, 'use_l2warp': True, 'tie_word_embeddings': False},
}


def build(device, layers: int = 1, **options) -> LonghornForCausalLM:
    model = LonghornForCausalLM(small(num_hidden_layers=layers, **options)).to(device).train()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return model


def batch(device, B: int = 2, T: int = 17) -> dict[str, torch.Tensor]:
    ids = torch.randint(53, (B, T), device=device)
    return {'input_ids': ids, 'labels': ids.masked_fill(torch.rand(B, T, device=device) < 0.3, -100)}


def results(call, model: LonghornForCausalLM, **inputs) -> dict[str, torch.Tensor]:
    """Loss, logits and the gradients of all parameters."""
    output = call(**inputs)
    # fla's loss writes the logits' gradient over them
    logits = {} if output.logits is None else {'logits': output.logits.detach().clone()}
    return {'loss': output.loss.detach(), **logits} | gradients(output.loss, model.named_parameters())


def check(model: LonghornForCausalLM, inputs: dict, backend: str = 'aot_eager', tolerance: float = 2e-6) -> None:
    expected = results(model, model, **inputs)
    function, counter = compiled(model, backend)
    assert_equal(results(function, model, **inputs), expected, tolerance)
    assert counter.frame_count == 1


@pytest.mark.parametrize('name', list(VARIANTS))
def test_training(name, device):
    check(build(device, **VARIANTS[name]), batch(device))


@cheap_kernels
def test_inductor(device):
    check(build(device), batch(device), 'inductor', 5e-6)


@pytest.mark.parametrize('options', [{}, LINEAR], ids=['', 'linear loss'])
def test_reductions(options, device):
    """The number of items given, and no label to learn from."""
    model, inputs = build(device, **options), batch(device)
    check(model, inputs | {'num_items_in_batch': torch.tensor(5, device=device)})
    function, _ = compiled(model)
    inputs['labels'].fill_(-100)
    torch.testing.assert_close(function(**inputs).loss, model(**inputs).loss, equal_nan=True)


def test_criterion_of_the_user(device):
    model = build(device, use_l2warp=True)
    model.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    check(model, batch(device))


def test_packed_and_long(device):
    check(build(device), batch(device, 1, 80) | {'cu_seqlens': torch.tensor([0, 3, 70, 80], device=device)})


def test_gradient_checkpointing(device):
    model, inputs = build(device), batch(device)
    expected = results(model, model, **inputs)
    model.gradient_checkpointing_enable({'use_reentrant': False})
    function, counter = compiled(model)
    assert_equal(results(function, model, **inputs), expected)
    assert counter.frame_count == 1


def test_bfloat16(device):
    model, inputs = build(device, hidden_ratio=2).bfloat16(), batch(device)
    assert model(**inputs).loss.dtype == torch.float32
    check(model, inputs, tolerance=3e-2)


def test_inference_outputs(device):
    """Hidden states, tuples, and the cache that a call without one returns."""
    model = build(device).eval()
    ids = batch(device)['input_ids']
    function, counter = compiled(model)
    with torch.no_grad():
        output, expected = (call(ids, output_hidden_states=True) for call in (function, model))
        assert_equal(dict(enumerate(output.hidden_states)), dict(enumerate(expected.hidden_states)))
        assert_equal({'logits': output.logits}, {'logits': expected.logits})
        cache = output.past_key_values
        assert type(cache) is type(expected.past_key_values)
        assert cache.get_seq_length() == 17
        states = ('recurrent_state', 'conv_state')
        assert_equal(*({name: x[0][name] for name in states} for x in (cache, expected.past_key_values)))
        assert counter.frame_count == 1
        assert_equal({'logits': function(ids, return_dict=False, use_cache=False)[0]}, {'logits': expected.logits})
