"""Waits for the device are counted where they come from, refused in a capture, and what a capture saw can be replayed."""

from pathlib import Path

import pytest
import torch

from offgpu.pretend import counted
from packages.offgpu.tests.pretend.test_device import draw

HERE = Path(__file__).name


WAITS = {
    'item': lambda x: x[0].item(),
    'bool': lambda x: bool(x[0] > 0),
    'tolist': lambda x: x.tolist(),
    'cpu': lambda x: x.cpu(),
    'upload': lambda x: torch.ones(4).cuda(),
    'mask': lambda x: x[x > 0],
    'mask on the left': lambda x: x.__setitem__(x > 0, x.abs()[x > 0]),
    'nonzero': lambda x: x.nonzero(),
    'masked_select': lambda x: x.masked_select(x > 0),
    'unique': lambda x: x.unique(),
    'equal': lambda x: torch.equal(x, x),
    'repeat_interleave': lambda x: torch.arange(4, device='cuda').repeat_interleave(torch.arange(4, device='cuda')),
    'indices of the CPU': lambda x: x[torch.tensor([0, 1])],
    'synchronize': lambda x: torch.cuda.synchronize(),
    'event': lambda x: torch.cuda.Event().synchronize(),
}
FREE = {
    'arithmetic': lambda x: (x * 2 + 1).relu().sum(),
    'mask filled': lambda x: x.__setitem__(x > 0, 0.),
    'where': lambda x: torch.where(x > 0, x, 0),
    'indices': lambda x: x[torch.arange(2, device='cuda')],
    'slices': lambda x: x[1:3].view(2, 1).clone(),
    'sized repeat_interleave': lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device='cuda'), output_size=4),
    'asynchronous copy': lambda x: torch.ones(4).to('cuda', non_blocking=True),
    'dropout': lambda x: torch.nn.functional.dropout(x),
}


@pytest.mark.parametrize('name', list(WAITS))
def test_waits_are_counted_with_their_places(name):
    x = draw(4)
    with counted() as counts:
        WAITS[name](x)
    expected = 2 if name == 'mask on the left' else 1
    assert counts.syncs.total() == counts.stacks.total() == expected, counts.stacks
    assert all(f'{HERE}:{WAITS[name].__code__.co_firstlineno} <- ' in stack for stack in counts.stacks)


@pytest.mark.parametrize('name', list(FREE))
def test_what_does_not_wait(name):
    x = draw(4)
    # a graph waits where it begins
    with torch.cuda.graph(torch.cuda.CUDAGraph()), counted() as counts:
        FREE[name](x)
    assert not counts.syncs and counts.ops.total() > 0


def test_operators_and_allocations():
    x = draw(4)
    with counted() as counts:
        y = x + x
        y.mul_(2)
        y.view(2, 2)[0].detach()
    assert sorted(name.split('.')[0] for name in counts.ops.elements()) == ['aten::add', 'aten::mul']
    assert counts.allocations == 1
    y.mul_(2)
    assert counts.ops.total() == 2


@pytest.mark.parametrize('name', list(WAITS))
def test_captures_refuse_waits(name):
    x, graph = draw(4), torch.cuda.CUDAGraph()
    # as on a GPU: what was refused is the context of what the end of the capture says
    with pytest.raises(RuntimeError, match='previous error during capture') as caught, torch.cuda.graph(graph):
        WAITS[name](x)
    assert 'operation not permitted when stream is capturing' in str(caught.value.__context__)
    assert not torch.cuda.is_current_stream_capturing()
    # which `torch.cuda.graph` leaves to its caller
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match='without a preceding successful capture'):
        graph.replay()


def test_replay():
    x, state, graph = torch.zeros(3, device='cuda'), torch.zeros(3, device='cuda'), torch.cuda.CUDAGraph()

    def step():
        y = x * 2 + 1
        state.add_(y)
        parts = torch.stack([y, state]).unbind()
        # `arange` grows an empty tensor
        return torch.cat(parts).view(2, 3), torch.empty(3, device='cuda').copy_(y), y.max(0), torch.arange(3, device='cuda')

    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        joined, copied, (largest, place), grown = step()
    total = state.cpu()
    for values in ([1., 2., 3.], [9., 5., 0.]):
        x.copy_(torch.tensor(values))
        graph.replay()
        y = 2 * torch.tensor(values) + 1
        total += y
        assert torch.equal(joined.cpu(), torch.stack([y, total])) and torch.equal(copied.cpu(), y)
        assert grown.tolist() == [0, 1, 2]
        assert torch.equal(state.cpu(), total) and (largest.item(), place.item()) == (y.max(), y.argmax())


def test_replay_of_a_training_step():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2).cuda()
    x, graph = torch.zeros(4, 3, device='cuda'), torch.cuda.CUDAGraph()

    def step():
        for p in layer.parameters():
            p.grad.zero_()
        layer(x).square().sum().backward()

    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    step()
    with torch.cuda.graph(graph):
        step()
    x.copy_(draw(4, 3))
    graph.replay()
    got = [p.grad.clone() for p in layer.parameters()]
    step()
    torch.testing.assert_close(got, [p.grad for p in layer.parameters()])
