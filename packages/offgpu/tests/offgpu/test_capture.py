"""Bytes of PyTorch's own kernels in a captured pass."""

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
