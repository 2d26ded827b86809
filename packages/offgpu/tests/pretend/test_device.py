"""What a tensor on the pretend device does that one on the CPU does not, and what it does alike."""

import threading

import pytest
import torch

from tests import forks


def draw(*shape: int, **options) -> torch.Tensor:
    return torch.randn(*shape, device='cuda', **options)


def test_a_tensor_is_an_ordinary_one():
    x = draw(2, 3)
    assert type(x) is torch.Tensor and x.is_cuda and x.device == torch.device('cuda', 0) and x.cpu().device.type == 'cpu'
    assert torch.zeros(2, device='cuda:0').device == x.new_empty(3).device == torch.empty_like(x).device == x.device


@pytest.mark.parametrize('mix', [
    lambda x: x + torch.ones(2, 3),
    lambda x: x @ torch.ones(3, 2),
    lambda x: torch.cat([x, torch.ones(2, 3)]),
    lambda x: torch.where(torch.ones(2, 3, dtype=torch.bool), x, x),
    lambda x: x.mul_(torch.ones(2, 3)),
    lambda x: torch.ones(2, 3).mul_(x),
    lambda x: torch.nn.functional.linear(x, torch.ones(4, 3)),
    lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.long)),
    lambda x: torch.ones(2, 3)[x > 0],
    lambda x: torch.nn.functional.embedding(torch.zeros(2, dtype=torch.long), x),
    lambda x: x.set_(torch.ones(2, 3)),
])
def test_devices_do_not_mix(mix):
    with pytest.raises(RuntimeError, match='device|cpu'):
        mix(draw(2, 3))


def test_in_place_returns_the_tensor_itself_and_notes_a_version():
    x = draw(3)
    version = x._version
    assert x.add_(1) is x and x._version == version + 1
    y = draw(3, requires_grad=True)
    z = y.exp()
    z.mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        z.sum().backward()


def test_backward_runs_on_the_device_thread():
    threads = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            threads.append(threading.current_thread())
            return dy

    for device in ('cpu', 'cuda'):
        with torch.autograd.set_multithreading_enabled(True):
            Note.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    assert threads[0] is threading.main_thread() is not threads[1]


def test_random_numbers():
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    on_cpu, x = torch.random.get_rng_state(), draw(4)
    assert torch.equal(torch.random.get_rng_state(), on_cpu) and not torch.equal(torch.cuda.get_rng_state(), state)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(4), x) and not torch.equal(draw(4), x)
    with torch.random.fork_rng():
        y = draw(4)
    assert torch.equal(draw(4), y)
    own = [draw(4, generator=torch.Generator('cuda').manual_seed(5)) for _ in range(2)]
    assert torch.equal(*own)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        draw(4, generator=torch.Generator())


def test_memory_is_counted():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.empty(2**20, dtype=torch.uint8, device='cuda')
    assert torch.cuda.memory_allocated() - before == 2**20
    y = x + x
    assert torch.cuda.memory_allocated() - before == 2**21
    del x, y
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() - before == 2**21
    free, total = torch.cuda.mem_get_info()
    assert total == torch.cuda.get_device_properties().total_memory and total - free == torch.cuda.memory_allocated()


def test_streams_and_events():
    stream, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream != torch.cuda.default_stream()
        start.record()
        end.record()
    end.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() and start.elapsed_time(end) > 0


SEVERAL = '''
import os, pytest, torch, triton
import triton.language as tl

@triton.jit
def double(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, 2 * tl.load(x + at))

assert torch.cuda.device_count() == 2
x, y = torch.ones(4, device='cuda:0', requires_grad=True), torch.ones(4, device='cuda:1')
assert (y + 1).device == y[1:].device == torch.device('cuda:1') and torch.equal(y.cpu(), x.cpu())
with pytest.raises(RuntimeError, match='same device'):
    x + y
# over the other device, and back in its backward
(x.to('cuda:1') * y).sum().backward()
assert x.grad.device == x.device
with torch.cuda.device(1):
    assert torch.empty(2, device='cuda').device == y.device
    double[1,](y, y, N=4)
assert torch.cuda.current_device() == 0 and y.tolist() == [2.] * 4
with pytest.raises(ValueError, match='double is launched on cuda:0 with a tensor on cuda:1'):
    double[1,](y, y, N=4)
with pytest.raises(RuntimeError, match='invalid device ordinal'):
    torch.ones(2, device='cuda:2')

# new memory is poisoned
assert torch.empty(3, device='cuda').isnan().all() and not torch.zeros(3, device='cuda').any()

# a child of a process that has used the device may not
child = os.fork()
if child == 0:
    try:
        torch.ones(2, device='cuda')
    except RuntimeError as error:
        os._exit(7 if 'Cannot re-initialize CUDA in forked subprocess' in str(error) else 1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print('done')
'''


def test_programs_several_devices_poison_and_forks():
    variables = {'PRETEND_IMPORT': '', 'PRETEND_DEVICES': '2', 'PRETEND_POISON': '1'}
    assert forks.output('-c', SEVERAL, env=variables).endswith('done\n')
