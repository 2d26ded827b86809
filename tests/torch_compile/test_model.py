"""`LonghornForCausalLM` under `torch.compile`: logits, losses and gradients in one graph, equal to eager."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn import LonghornForCausalLM
from tests.devices import slow_but
from tests.models.test_longhorn import VARIANTS, small
from tests.torch_compile.graphs import assert_equal, cheap_kernels, compiled, gradients


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


@pytest.mark.parametrize('name', slow_but(('exact', 'powlu', 'linear loss, l2warp'), VARIANTS))
def test_training(name, device):
    check(build(device, **VARIANTS[name]), batch(device))


@cheap_kernels
@pytest.mark.compiler
@pytest.mark.slow
def test_inductor(device):
    check(build(device), batch(device), 'inductor', 5e-6)


def test_packed_and_long(device):
    check(build(device), batch(device, 1, 80) | {'cu_seqlens': torch.tensor([0, 3, 70, 80], device=device)})


CHANGES = {
    'criterion': lambda model: setattr(model, 'criterion', nn.CrossEntropyLoss(label_smoothing=0.1)),
    'checkpointing': lambda model: model.gradient_checkpointing_enable({'use_reentrant': False}),
    'bfloat16': lambda model: model.bfloat16(),
}


@pytest.mark.parametrize('change', list(CHANGES))
def test_changed(change, device):
    model = build(device, hidden_ratio=2, use_l2warp=change == 'criterion')
    CHANGES[change](model)
    assert model(**batch(device)).loss.dtype == torch.float32
    check(model, batch(device), tolerance=3e-2 if change == 'bfloat16' else 2e-6)
