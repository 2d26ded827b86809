"""Second derivatives of a model, by each way to them: right, or an error that says that there are none."""

import pytest
import torch

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from fla_longhorn.selfcheck.compare import relative_error
from tests.models.test_longhorn import small

MODELS = {
    'paper': {}, 'MLP': {'hidden_ratio': 2}, 'linear loss': {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True},
    'plain loss': {'fuse_cross_entropy': False, 'fuse_norm': False}, 'attention': {'attn': {'layers': [1], 'num_heads': 2}},
}
PARTS = ('lm_head', 'model.norm', 'layers.1.attn.out_proj', 'layers.1.attn.o_proj', 'layers.1.mlp', 'layers.0.attn.conv1d', '')


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('name', MODELS)
def test_product_with_the_hessian(name, part, device):
    """As PyHessian computes it, of the weights of a part, against differences of gradients."""
    model = LonghornForCausalLM(small(num_hidden_layers=2, tie_word_embeddings=False, **MODELS[name])).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    ids = torch.randint(1, 53, (2, 20), device=device)
    for key, p in model.named_parameters():
        p.requires_grad_(part in key)
    weights = [p for p in model.parameters() if p.requires_grad]
    if not weights:
        return

    def gradients(**options):
        return torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, weights, **options)

    directions = [torch.randn_like(p) / 50 for p in weights]
    try:
        found = torch.autograd.grad(gradients(create_graph=True), weights, directions, allow_unused=True)
    except RuntimeError as error:
        assert any(x in str(error) for x in ('no second derivative', 'silu_backward is not implemented')), error
        return
    at = []
    for step in (1e-2, -2e-2):
        with torch.no_grad():
            for p, v in zip(weights, directions, strict=True):
                p.add_(v, alpha=step)
        at.append(gradients())
    wanted = torch.cat([(a - b).flatten() / 2e-2 for a, b in zip(*at, strict=True)])
    got = torch.cat([torch.zeros_like(w).flatten() if x is None else x.flatten() for x, w in zip(found, weights, strict=True)])
    assert relative_error(got, wanted) < 2e-2


@pytest.mark.parametrize('options', [{}, {'exact': True}, {'recompute': False}], ids=str)
@pytest.mark.parametrize('name', ['hessian', 'hvp', 'vhp'])
def test_functional(name, options, device):
    """`torch.func`, which differentiates the recurrence, is right; `autograd.functional` raises."""
    layer, x = Longhorn(hidden_size=8, state_size=4, **options).to(device), torch.randn(1, 6, 8, device=device)
    arguments = () if name == 'hessian' else (torch.ones_like(x),)
    with pytest.raises(RuntimeError, match='no second derivative|silu_backward is not implemented'):
        getattr(torch.autograd.functional, name)(lambda x: layer(x)[0].square().sum(), x, *arguments)
