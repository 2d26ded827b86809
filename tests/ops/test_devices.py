"""Several GPUs: kernels run on the device of their tensors, not on PyTorch's current one. Rehearsed without any."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fla_longhorn.ops import triton as longhorn_triton
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.triton.diagonal import summaries


@pytest.fixture
def entered(monkeypatch):
    """The device indices whose contexts are open; the last of them is current."""
    stack = []

    @contextmanager
    def context(index):
        stack.append(index)
        yield
        stack.pop()

    for module in (longhorn_triton, summaries):
        monkeypatch.setattr(module, 'custom_device_ctx', context)
    return stack


@pytest.fixture
def second():
    """Arguments whose tensors are on the second of two GPUs, by what stands for a tensor there."""
    return Arguments(*[SimpleNamespace(device=torch.device('cuda:1'), shape=(1, 4, 1, 3))] * 4)


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_ops(exact, entered, second, monkeypatch):
    name = 'exact' if exact else 'diagonal'
    for direction in ('fwd', 'bwd'):
        monkeypatch.setattr(longhorn_triton, f'{name}_{direction}', lambda *args, **options: list(entered))
    args = second._replace(exact=exact)
    assert longhorn_triton.longhorn_fwd(args, save_states=False, parallel=True) == [1]
    assert longhorn_triton.longhorn_bwd(None, None, None, args, parallel=True) == [1]
    assert not entered


def test_summaries(entered, second, monkeypatch):
    monkeypatch.setattr(summaries, 'prepare_rows', lambda *args, **options: None)
    monkeypatch.setattr(summaries.segments, 'choose_segment_length', lambda *args: 4)
    monkeypatch.setattr(summaries.segments, 'summarize_segments', lambda *args, **options: ([None], list(entered)))
    assert summaries.forward_summary(second)[1] == [1]
    assert summaries.backward_summary(second.v, second) == [1]
    assert not entered
