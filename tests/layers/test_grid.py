"""More rows or tokens than the launches of fla's convolution have room for (CUDA's limit of 65,535, here a small one)."""

import pytest
import torch

from fla_longhorn.layers import Longhorn
from fla_longhorn.modules import convolution
from fla_longhorn.selfcheck.compare import relative_error


@pytest.mark.parametrize('shape', [(5, 7), (1, 300), (5, 1)], ids=str)
@pytest.mark.parametrize('how', ['plain', 'padded', 'packed'])
def test_beyond_the_grid(shape, how, device, monkeypatch):
    """The same outputs and gradients; fla's kernels are not called."""
    torch.manual_seed(0)
    layer = Longhorn(hidden_size=16, state_size=4).to(device)
    x = torch.randn(*shape, 16, device=device, requires_grad=True)
    options = {}
    if how == 'padded':
        options['attention_mask'] = torch.ones(shape, dtype=torch.long, device=device)
        options['attention_mask'][:, shape[1] // 2:shape[1] // 2 + 1] = shape[0] > 1
    if how == 'packed':
        x = x.detach().flatten(0, 1)[None].requires_grad_()
        options['cu_seqlens'] = torch.tensor([0, 1, x.shape[1]], device=device)

    def run():
        y = layer(x, **options)[0]
        return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    want = run()
    monkeypatch.setattr(convolution, 'MAX_GRID', 3)
    if torch.device(device).type != 'cpu':
        monkeypatch.setattr('fla.modules.causal_conv1d.ops.causal_conv1d_fwd', None)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(run(), want, strict=True))
