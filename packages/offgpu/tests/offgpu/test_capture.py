"""Bytes and operations of PyTorch's own kernels in a captured pass."""

import pytest
import torch

from offgpu.predict.capture import Operators


def test_bytes_of_what_pytorch_moves():
    """What is filled is written, what is copied is read and written, what is added to is read, too."""
    x, y = torch.ones(100), torch.ones(100, dtype=torch.float16)
    launches = []
    with Operators(launches):
        torch.zeros_like(x)
        x.fill_(2)
        y.copy_(x)
        x.add_(1)
        x.to(torch.float16)
        torch.empty_like(x)
    assert [(launch.kernel, launch.nbytes) for launch in launches] == [
        ('torch.zeros_like', 400), ('torch.fill_', 400), ('torch.copy_', 600), ('torch.add_', 800), ('torch._to_copy', 600),
    ]


@pytest.mark.parametrize('multiply', [
    lambda a, b, c: a @ b, lambda a, b, c: torch.mm(a, b, out=c), lambda a, b, c: torch.addmm(c, a, b),
    lambda a, b, c: c.addmm_(a, b), lambda a, b, c: torch.nn.functional.linear(a, b.T),
    lambda a, b, c: c[None].baddbmm_(a[None], b[None]),
], ids=['mm', 'mm into', 'addmm', 'addmm in place', 'linear', 'baddbmm in place'])
def test_operations_of_products(multiply):
    a, b, c = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
    launches = []
    with Operators(launches):
        multiply(a, b, c)
    assert sum(launch.flops for launch in launches) == 2 * 3 * 5 * 7
