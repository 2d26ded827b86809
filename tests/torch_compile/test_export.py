"""`torch.export`: one program for all batches and lengths, saved and loaded."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn.ops import longhorn_state_update
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


@pytest.mark.parametrize(('padded', 'strict'), [
    pytest.param(False, False, marks=pytest.mark.slow), (True, False), pytest.param(True, True, marks=pytest.mark.slow),
], ids=['', 'mask', 'strict'])
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
