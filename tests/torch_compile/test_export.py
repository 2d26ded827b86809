"""`torch.export`: one program for all batches and lengths, saved and loaded."""

from functools import partial

import pytest
import torch
import torch.nn as nn

from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update
from tests.torch_compile.graphs import assert_equal
from tests.torch_compile.test_model import build

BATCH, LENGTH = torch.export.Dim('batch', min=1, max=64), torch.export.Dim('length', min=2, max=1 << 16)


class Call(nn.Module):
    """A function of the modules given and of tensors, as a module."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.needed = function, nn.ModuleList(modules)

    def forward(self, *inputs):
        return self.function(*self.needed, *inputs)


def check(module: Call, arguments, shapes: tuple, sizes: list[tuple], exported=lambda program: program, **options) -> None:
    """A program of the first sizes gives what the module gives, at all sizes."""
    program = exported(torch.export.export(module, arguments(*sizes[0]), dynamic_shapes=(shapes,), **options)).module()
    for size in sizes:
        inputs = arguments(*size)
        with torch.no_grad():
            got, expected = (y if isinstance(y, tuple) else (y,) for y in (program(*inputs), module(*inputs)))
        assert_equal(dict(enumerate(got)), dict(enumerate(expected)))


def logits_of(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize(('padded', 'strict'), [(False, False), (True, False), (True, True)], ids=['', 'mask', 'strict'])
def test_model(padded, strict, tmp_path, device):
    module = Call(logits_of, build(device, hidden_ratio=2, exact=padded).eval())

    def arguments(B, T):
        ids = torch.randint(53, (B, T), device=device)
        return (ids, (torch.rand(B, T, device=device) < 0.7).long()) if padded else (ids,)

    def saved(program):
        torch.export.save(program, tmp_path / 'model.pt2')
        return torch.export.load(tmp_path / 'model.pt2')

    sizes = [(3, 11), (1, 2), (2, 64), (1, 65), (4, 150), (7, 3), (20, 2), (5, 5)]
    check(module, arguments, ({0: BATCH, 1: LENGTH},) * (1 + padded), sizes, saved, strict=strict)


def operator_inputs(B: int, T: int, device) -> tuple[torch.Tensor, ...]:
    q, k = torch.randn(2, B, T, 3, 4, device=device)
    v, beta = torch.randn(B, T, 3, 6, device=device), torch.rand(B, T, 3, 6, device=device)
    return q, k, v, beta


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn], ids=lambda op: op.__name__)
def test_operator(op, device):
    """No size is tied to another one: batches below and above the number of heads and the length."""
    sizes = [(5, 4), (4, 5), (1, 2), (2, 2), (64, 3), (2, 70)]
    module = Call(partial(op, output_final_state=True))
    check(module, lambda B, T: operator_inputs(B, T, device), ({0: BATCH, 1: LENGTH},) * 4, sizes)


def update(pool, q, k, v, beta, state_indices):
    pool = pool.clone()
    return longhorn_state_update(pool, q, k, v, beta, state_indices=state_indices), pool


@pytest.mark.parametrize('T', [1, 3])
def test_pool(T, device):
    """Any number of sequences and of states in the pool."""
    def arguments(N, P):
        return torch.randn(P, 3, 4, 6, device=device), *operator_inputs(N, T, device), torch.randperm(P, device=device)[:N]

    rows, pool = {0: torch.export.Dim('N', min=1, max=64)}, {0: torch.export.Dim('P', min=1, max=64)}
    check(Call(update), arguments, (pool, rows, rows, rows, rows, rows), [(3, 8), (5, 5), (1, 2), (20, 64)])


def test_packed_layer(device):
    """With any number of sequences."""
    layer = Longhorn(hidden_size=24, state_size=4).to(device)

    def arguments(*lengths):
        h = torch.randn(1, sum(lengths), 24, device=device)
        return h, torch.tensor([0, *lengths], device=device).cumsum(0)

    shapes = ({1: LENGTH}, {0: torch.export.Dim('bounds', min=3, max=1000)})
    module = Call(lambda layer, h, cu_seqlens: layer(h, cu_seqlens=cu_seqlens)[0], layer)
    check(module, arguments, shapes, [(3, 5, 1), (4, 80), (2, 0, 1, 7, 60)])
