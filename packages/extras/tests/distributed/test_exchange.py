"""Which columns of `[x, z]` each rank of tensor parallelism gets."""

import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fla_longhorn_extras.tensor_parallel import Part
from tests import forks
from tests.ranks import fork


def exchange(size: int) -> None:
    """Each column holds its number, so that a block in another place shows; the gradient goes back where it came from."""
    mesh, width = init_device_mesh('cpu', (size,)), 3
    rank = mesh.get_local_rank()
    columns = torch.arange(2. * size * width).expand(2, 5, -1)
    y = columns.chunk(size, -1)[rank].clone().requires_grad_()
    for part, whole in zip(Part(mesh, slice(0, 1)).exchange(y).chunk(2, -1), columns.chunk(2, -1), strict=True):
        assert torch.equal(part, whole.chunk(size, -1)[rank]), (rank, part)
        (part.square() / 2).sum().backward(retain_graph=True)
    assert torch.equal(y.grad, y.detach())


@pytest.mark.parametrize('size', [3])
def test_exchange(size):
    forks.output('-m', 'packages.extras.tests.distributed.test_exchange', str(size))


if __name__ == '__main__':
    fork(exchange, int(sys.argv[1]), int(sys.argv[1]))
