"""Bytes of living tensors are counted once, by storage, until the last of its tensors is gone."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.memory import Memory

ROOT = Path(__file__).parents[2]


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


def test_the_command(tmp_path):
    """It ends, and its figures are those that are recorded and those of the page."""
    report = tmp_path / 'memory.json'
    subprocess.run([sys.executable, '-m', 'benchmarks', 'memory', '--json', str(report)], cwd=ROOT, check=True, timeout=600)
    found, recorded = (json.loads(x.read_text()) for x in (report, ROOT / 'benchmarks/results/memory.json'))
    assert found['rows'] == recorded['rows'] and found['scratch'] == recorded['scratch']
    page = (ROOT / 'lab/notebook/results.md').read_text()
    for row in found['rows']:
        cells = ['' if row[x] is None else f'{row[x]:.1f}' for x in ('kept', 'peak', 'moved')]
        assert f'| {" | ".join([row["layer"], *cells, format(row["cache"] / 1024, ",.0f")])} |' in page
