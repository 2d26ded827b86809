"""Bytes of living tensors are counted once, by storage, until the last of its tensors is gone."""

import torch

from benchmarks.memory import Memory


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
