"""Training in bfloat16 without NaN, the commonest complaint about Vision Mamba (hustvl/Vim#30, #90, #105)."""

import pytest
import torch
import torch.nn.functional as F

from packages.extras.tests.timm.models import gates, images, small


@gates
@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('size', [1., 1e3, 1e5])
def test_autocast(exact, gate, size, device):
    model = small(device, exact=exact, gate=gate).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(size * images(device, 4)), torch.arange(4, device=device) % 5)
        loss.backward()
        assert loss.isfinite() and all(x.grad.isfinite().all() for x in model.parameters()), step
        optimizer.step()
        optimizer.zero_grad()


@gates
def test_weights_in_bfloat16(gate, device):
    model, x = small(device, gate=gate), images(device)
    expected = model(x)
    seen = []
    model = model.bfloat16()
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    logits = model(x.bfloat16())
    # the residual stays in float32
    assert logits.dtype == torch.bfloat16 and seen == [torch.float32]
    assert (logits.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert (model.forward_packed(list(x.bfloat16())).float() - expected).abs().max() < 0.05 * expected.abs().max()
