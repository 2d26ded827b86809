"""`torch.export`: one program for all batches and lengths, saved and loaded."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update
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


class Call(nn.Module):
    """A function as a module, with options."""

    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *inputs):
        return self.function(*inputs, **self.options)


def operator_inputs(B: int, T: int, device) -> tuple[torch.Tensor, ...]:
    q, k = torch.randn(2, B, T, 3, 4, device=device)
    v, beta = torch.randn(B, T, 3, 6, device=device), torch.rand(B, T, 3, 6, device=device)
    return q, k, v, beta


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn], ids=lambda op: op.__name__)
def test_operator(op, device):
    """No size is tied to another one: batches below and above the number of heads and the length."""
    module = Call(op, output_final_state=True)
    shapes = (({0: BATCH, 1: LENGTH},) * 4,)
    program = torch.export.export(module, operator_inputs(5, 4, device), dynamic_shapes=shapes).module()
    for B, T in ((5, 4), (4, 5), (1, 2), (2, 2), (64, 3), (2, 70)):
        inputs = operator_inputs(B, T, device)
        assert_equal(dict(enumerate(program(*inputs))), dict(enumerate(module(*inputs))))


def update(pool, q, k, v, beta, state_indices):
    pool = pool.clone()
    return longhorn_state_update(pool, q, k, v, beta, state_indices=state_indices), pool


@pytest.mark.parametrize('T', [1, 3])
def test_pool(T, device):
    """Any number of sequences and of states in the pool."""
    def arguments(N, P):
        return torch.randn(P, 3, 4, 6, device=device), *operator_inputs(N, T, device), torch.randperm(P, device=device)[:N]

    rows, sizes = {0: torch.export.Dim('N', min=1, max=64)}, {0: torch.export.Dim('P', min=1, max=64)}
    shapes = ((sizes, rows, rows, rows, rows, rows),)
    program = torch.export.export(Call(update), arguments(3, 8), dynamic_shapes=shapes).module()
    for N, P in ((3, 8), (5, 5), (1, 2), (20, 64)):
        inputs = arguments(N, P)
        assert_equal(dict(enumerate(program(*inputs))), dict(enumerate(update(*inputs))))


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
