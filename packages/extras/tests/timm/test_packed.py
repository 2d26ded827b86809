"""Images of different sizes in one row of tokens."""

import pytest
import torch

from packages.extras.tests.timm.models import small

SIZES = [(12, 20), (4, 4), (24, 8), (8, 8)]


def draw(device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, *size, generator=generator).to(device) for size in SIZES]


@pytest.mark.parametrize('options', [
    {}, dict(exact=True), dict(global_pool='avg'), dict(class_token=False, global_pool='max'), dict(bidirectional=False),
    dict(global_pool=''), dict(gate='head'), dict(gate='channel', exact=True),
], ids=str)
def test_packed_is_separate(options, device):
    """Logits and gradients."""
    model, x, found = small(device, dynamic_img_size=True, **options), draw(device), []
    alone = torch.cat([model(image[None]).flatten(0, -2) for image in x])
    weight = torch.randn(alone.shape, device=device)
    for logits in (model.forward_packed(x), alone):
        found.append([logits, *torch.autograd.grad((logits * weight).sum(), list(model.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_stochastic_depth_drops_images(device):
    """With a rate near 1 some images skip the only block that can be skipped, and others of the row do not."""
    model = small(device, depth=2, drop_path_rate=0.5).train()
    skipping, x = small(device, depth=2), draw(device)
    with torch.no_grad():
        skipping.blocks[1].mixer.out_proj.weight.zero_()
    without = skipping.forward_packed(x)
    kinds = set()
    for seed in range(8):
        torch.manual_seed(seed)
        rows = model.forward_packed(x)
        kinds.add(tuple(torch.isclose(rows, without, atol=1e-5).all(1).tolist()))
    assert any(0 < sum(kind) < len(x) for kind in kinds)


@pytest.mark.parametrize('image', [torch.zeros(2, 12, 18), torch.zeros(1, 12, 20), torch.zeros(12, 20), torch.zeros(2, 0, 4)])
def test_wrong_images(image, device):
    with pytest.raises(ValueError, match=r'images\[1\]'):
        small(device).forward_packed([torch.zeros(2, 4, 4, device=device), image.to(device)])
    with pytest.raises(ValueError, match='images'):
        small(device).forward_packed([])
