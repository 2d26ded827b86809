"""`torch.export`: one program for all batches and lengths, saved and loaded."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn.layers import Longhorn
from tests.torch_compile.graphs import assert_equal
from tests.torch_compile.test_model import build

BATCH, LENGTH = torch.export.Dim('batch', min=1, max=64), torch.export.Dim('length', min=2, max=1 << 16)


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize(('padded', 'strict'), [(False, False), (True, False), (True, True)], ids=['', 'mask', 'strict'])
def test_model(padded, strict, tmp_path, device):
    module = Logits(build(device, hidden_ratio=2, exact=padded).eval())

    def arguments(B, T):
        ids = torch.randint(53, (B, T), device=device)
        return (ids, (torch.rand(B, T, device=device) < 0.7).long()) if padded else (ids,)

    example = arguments(3, 11)
    shapes = ({0: BATCH, 1: LENGTH},) * len(example)
    torch.export.save(torch.export.export(module, example, dynamic_shapes=shapes, strict=strict), tmp_path / 'model.pt2')
    program = torch.export.load(tmp_path / 'model.pt2').module()
    with torch.no_grad():
        for B, T in ((3, 11), (1, 2), (2, 64), (1, 65), (4, 150), (7, 3), (20, 2), (5, 5)):
            inputs = arguments(B, T)
            assert_equal({'logits': program(*inputs)}, {'logits': module(*inputs)})


class Mixed(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, h: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self.layer(h, cu_seqlens=cu_seqlens)[0]


def test_packed_layer(device):
    """With any number of sequences."""
    module = Mixed(Longhorn(hidden_size=24, state_size=4).to(device))

    def arguments(*lengths):
        h = torch.randn(1, sum(lengths), 24, device=device)
        return h, torch.tensor([0, *lengths], device=device).cumsum(0)

    shapes = ({1: LENGTH}, {0: torch.export.Dim('bounds', min=3, max=1000)})
    program = torch.export.export(module, arguments(3, 5, 1), dynamic_shapes=shapes).module()
    for lengths in ((3, 5, 1), (4, 80), (2, 0, 1, 7, 60)):
        inputs = arguments(*lengths)
        assert_equal({'o': program(*inputs)}, {'o': module(*inputs)})


def test_model_itself(device):
    """Without a wrapper, loss included."""
    model = build(device, use_l2warp=True).eval()
    ids = torch.randint(53, (2, 9), device=device)
    options = {'labels': ids, 'use_cache': False}
    program = torch.export.export(model, (ids,), options).module()
    with torch.no_grad():
        got, expected = program(ids, **options), model(ids, **options)
    assert_equal({'loss': got.loss, 'logits': got.logits}, {'loss': expected.loss, 'logits': expected.logits})
