"""Small models of the tests."""

import pytest
import timm
import torch

import fla_longhorn_extras.timm  # noqa: F401  registers

TINY = 'vision_longhorn_tiny_patch16_224'
SMALL_IMAGES = dict(img_size=(12, 20), patch_size=4, in_chans=2, num_classes=5, embed_dim=32, depth=3)
gates = pytest.mark.parametrize('gate', [None, 'head', 'channel'])


def small(device: torch.device, **options) -> torch.nn.Module:
    """3 by 5 patches of images of 12 by 20, width 32, 3 blocks; parameters that start at zero or one are drawn."""
    torch.manual_seed(0)
    model = draw_start_values(timm.create_model(TINY, **dict(SMALL_IMAGES, **options)).eval())
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model.to(device)


def draw_start_values(module: torch.nn.Module, *others: str) -> torch.nn.Module:
    for name, parameter in module.named_parameters():
        if name == 'D' or name.endswith(('.D', 'A_log', 'beta_proj.bias', *others)):
            torch.nn.init.normal_(parameter)
    return module


def images(device: torch.device, n: int = 2, size: tuple[int, int] = (12, 20)) -> torch.Tensor:
    return torch.randn(n, 2, *size, generator=torch.Generator().manual_seed(1)).to(device)
