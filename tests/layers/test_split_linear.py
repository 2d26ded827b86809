"""A projection to two tensors against `nn.Linear` and its `chunk`: the gradients, and that nothing around it is passed by."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn.modules.split_linear import split_linear
from fla_longhorn.selfcheck.compare import relative_error


def is_split(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ == 'SplitLinearBackward'


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize(('dtype', 'autocast', 'tolerance'), [
    (torch.float64, False, 1e-14), (torch.float32, False, 1e-6), (torch.bfloat16, False, 1e-2),
    (torch.float32, True, 1e-2), (torch.float64, True, 1e-14),
], ids=['float64', 'float32', 'bfloat16', 'autocast', 'float64-autocast'])
@pytest.mark.parametrize('frozen', ['nothing', 'weights', 'input'])
@pytest.mark.parametrize('used', [(0, 1), (0,), (1,)])
def test_gradients(bias, dtype, autocast, tolerance, frozen, used, device):
    linear = nn.Linear(6, 10, bias=bias, dtype=dtype, device=device).requires_grad_(frozen != 'weights')
    x = torch.randn(2, 7, 6, dtype=dtype, device=device, requires_grad=frozen != 'input')
    needed = [y for y in (x, *linear.parameters()) if y.requires_grad]
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        halves, want = split_linear(linear, x), linear(x).chunk(2, -1)
    assert all(map(is_split, halves)) and all(map(torch.equal, halves, want))
    # of a strided gradient too
    do = [torch.randn(7, 2, 5, dtype=y.dtype, device=device).transpose(0, 1) for y in want]
    gradients = [torch.autograd.grad([y[i] for i in used], needed, [do[i] for i in used]) for y in (halves, want)]
    assert all(a.dtype == b.dtype and relative_error(a, b) <= tolerance for a, b in zip(*gradients, strict=True))


class Weight(torch.Tensor):
    """As quantisation and DTensor have them."""


def test_left_alone(device):
    """What is put in or around `linear` is called; a weight of a class of its own serves `nn.Linear` alone."""
    linear, x = nn.Linear(6, 10, device=device), torch.randn(2, 7, 6, device=device)
    assert is_split(split_linear(linear, x)[0])
    with torch.no_grad():
        assert split_linear(linear, x)[0].grad_fn is None
    assert not is_split(torch.func.vjp(lambda x: split_linear(linear, x)[0], x)[0])
    called = []
    handle = linear.register_forward_hook(lambda *args: called.append(args))
    assert not is_split(split_linear(linear, x)[0]) and called
    handle.remove()
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Weight))
    assert type(linear.weight) is not nn.Parameter and not is_split(split_linear(linear, x)[0])
