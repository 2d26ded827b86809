"""Bytes of living tensors are counted once, by storage, until the last of its tensors is gone."""

import torch

from benchmarks.memory import Memory
from benchmarks.recompute import measured_cost
from benchmarks.report.memory import recomputation


def test_memory():
    known = torch.empty(100, dtype=torch.float32, device='meta')
    with Memory([], [known]) as memory:
        x = torch.empty(10, dtype=torch.float32, device='meta')
        views = x[2:], known[1:]
        assert memory.now == 40
        y = x + 1
        assert memory.now == 80
        del x
        assert memory.now == 80
        del views, y
        assert (memory.now, memory.peak) == (0, 80)


def test_moved():
    """What is read and what is written, each tensor once; views and allocations move nothing."""
    with Memory([]) as memory:
        x = torch.empty(10, dtype=torch.float32, device='meta')
        x[2:].view(2, 4)
        assert memory.moved == 0
        y = x + x
        assert memory.moved == 80
        y += x
        assert memory.moved == 160


def test_kept_for_backward():
    """The input of a square, and nothing of a sum."""
    with Memory([]) as memory:
        x = torch.empty(10, dtype=torch.float32, device='meta').requires_grad_()
        o = x.square().sum()
        del x
        assert memory.now == 44
        o.backward()
        del o
        assert memory.peak >= 84


def test_recomputation():
    """The predicted share is that of two layers' steps, and the measured one that of the ratio."""
    measured = measured_cost(32, False, torch.float32, tokens=16, pairs=2)
    assert measured['ratio_low'] <= measured['ratio'] <= measured['ratio_high']
    report = {'machine': {'device': 'CPU', 'threads': 1, 'versions': {}, 'commit': None}, 'measured': [measured]}
    times = {'Longhorn, diagonal': 103.0, 'Longhorn, diagonal, recompute=False': 100.0}
    rows = [{'gpu': 'H100', 'model': '1.3B', 'pass': 'step', 'layer': name, 'us': us} for name, us in times.items()]
    page = recomputation(report, {'rows': rows})
    assert '3.0% (1.3B), predicted for an H100' in page and f'{measured["ratio"] - 1:.1%} (' in page
