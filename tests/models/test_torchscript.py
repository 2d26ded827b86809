"""`torch.jit.trace`: one graph for every length, and for calls with and without gradients."""

import pytest
import torch

from tests.models.test_cache import build


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize('options', [
    {}, {'exact': True, 'num_heads': 2}, {'attn': {'layers': [1], 'num_heads': 2}},
], ids=['diagonal', 'exact', 'attention'])
def test_trace(options, device, tmp_path):
    model = Logits(build(device, **options))
    with torch.no_grad():
        torch.jit.save(torch.jit.trace(model, torch.randint(3, 53, (2, 9), device=device)), tmp_path / 'model.pt')
    traced = torch.jit.load(tmp_path / 'model.pt')
    ids = torch.randint(3, 53, (1, 21), device=device)
    torch.testing.assert_close(traced(ids), model(ids))
    traced(ids).square().sum().backward()
    got = [p.grad for p in traced.parameters()]
    model(ids).square().sum().backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])
