"""Bytes of living tensors are counted once, by storage, until the last of its tensors is gone."""

import torch

from benchmarks.memory import Memory
from benchmarks.predict.run import machine_of
from benchmarks.recompute import measured_cost, predicted_cost
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


def test_cost_of_recomputation():
    """Of a step: the operators' predicted times and at least what the rest moves; of a convolution, x and y."""
    machine = machine_of('H100', [])
    shape = {'gpu': 'H100', 'B': 8, 'T': 2048, 'V': 4096, 'K': 16}
    rows = [shape | {'pass': 'diagonal_fwd', 'ms': 1}, shape | {'pass': 'diagonal_bwd', 'ms': 4}]
    row = predicted_cost('1.3B', False, rows, machine)
    convolution = 1e3 * 4 * 8 * 2048 * 4096 / machine.dram_bandwidth
    assert row['operators_ms'] == 5 and convolution < row['again_ms'] < 2 * convolution < row['rest_ms']
    assert abs(row['share'] - row['again_ms'] / (5 + row['rest_ms'])) < 1e-3
    measured = measured_cost(32, False, torch.float32, tokens=16, pairs=2)
    assert measured['ratio_low'] <= measured['ratio'] <= measured['ratio_high']
    place = {'device': 'CPU', 'threads': 1, 'versions': {}, 'commit': None}
    report = {'machine': place, 'predicted': [row], 'measured': [measured]}
    assert f'{row["share"]:.1%}' in recomputation(report)
