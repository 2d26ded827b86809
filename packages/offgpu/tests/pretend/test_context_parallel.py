"""What ranks of context parallelism exchange is on the device: states, summaries and their gradients.

What they send is as NCCL takes it, dense and on the device; gloo carries it in the device's memory, which is the host's.
"""

import torch
import torch.distributed as dist

from tests import forks
from tests.ops.context_parallel import test_op as op
from tests.ranks import fork

CASES = ('whole, all options', 'boundaries inside', 'empty sequences', 'scalar beta')


def on_device(x: torch.Tensor) -> torch.Tensor:
    if not (x.is_cuda and x.is_contiguous()):
        raise ValueError(f'ranks send dense tensors of the device, got one on {x.device} with strides {x.stride()}')
    return torch.ops.pretend.host(x)


def send_on_device() -> None:
    all_gather, isend, recv = dist.all_gather, dist.isend, dist.recv
    dist.all_gather = lambda out, x, **options: all_gather(list(map(on_device, out)), on_device(x), **options)
    dist.isend = lambda x, **options: isend(on_device(x), **options)
    dist.recv = lambda out, **options: recv(on_device(out), **options)


def main() -> None:
    send_on_device()
    jobs = op.jobs(2)
    for name in CASES:
        for exact in (False, True):
            parts = [None] * 2
            dist.all_gather_object(parts, op.run(jobs[name], exact, dist.group.WORLD, 'cuda'))
            op.verify(jobs[name].case, exact, parts)


def test_two_ranks_equal_one():
    forks.output('-m', 'packages.offgpu.tests.pretend.test_context_parallel', env={'PRETEND_FAST': '1'})


if __name__ == '__main__':
    # importing fla initialises CUDA
    fork(main, 2, start_method='spawn')
