"""Triton on the pretend device: launches on its memory, what it refuses, and graphs of launches."""

import pytest
import torch
import triton
import triton.language as tl

from offgpu.pretend import counted


@triton.jit
def add_rows(x, y, stride, T: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros([N], dtype=tl.float32)
    for i in range(T):
        # a loop's counter is a tensor for the compiler
        total += tl.load(x + i.to(tl.int64) * stride + at, mask=(at < N) * (i < T), other=0.)
    tl.store(y + tl.program_id(0) * N + at, total)


@triton.autotune([triton.Config({'B': B}) for B in (2, 4)], key=['N'])
@triton.jit
def tuned(x, N, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + at, B, mask=at < N)


def test_a_kernel_runs_on_the_memory_itself():
    x, y = torch.randn(5, 16, device='cuda')[:, 4:8], torch.zeros(2, 4, device='cuda')
    with counted() as counts:
        add_rows[(2,)](x, y, x.stride(0), T=5, N=4)
    torch.testing.assert_close(y.cpu(), x.cpu().sum(0).expand(2, 4))
    assert counts.launches == {'add_rows': 1} and counts.grids == [('add_rows', (2,))] and not counts.syncs


def test_tensors_of_the_cpu_are_refused():
    x, y = torch.randn(5, 4, device='cuda'), torch.zeros(4)
    with pytest.raises(ValueError, match=r'Pointer argument cannot be accessed from Triton \(cpu tensor\?\): add_rows'):
        add_rows[(1,)](x, y, 4, T=5, N=4)


def test_launches_are_replayed():
    x, y, graph = torch.ones(5, 4, device='cuda'), torch.zeros(4, device='cuda'), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = x * 2
        add_rows[(1,)](double, y, 4, T=5, N=4)
        z = y + 1
    del double
    x.fill_(3)
    graph.replay()
    assert z.tolist() == [31.] * 4
    graph.reset()
    with pytest.raises(RuntimeError, match='without a preceding successful capture'):
        graph.replay()


def test_the_last_configuration_is_chosen():
    x = torch.zeros(4, device='cuda')
    tuned[lambda meta: (triton.cdiv(4, meta['B']),)](x, 4)
    assert x.tolist() == [4.] * 4


def test_the_driver_says_what_torch_says():
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    assert properties['multiprocessor_count'] == torch.cuda.get_device_properties().multi_processor_count
    target = triton.runtime.driver.active.get_current_target()
    assert (target.backend, divmod(target.arch, 10)) == ('cuda', torch.cuda.get_device_capability())
    assert triton.runtime.driver.active.get_active_torch_device() == torch.device('cuda', 0)
