"""Several GPUs: kernels run on the device of their tensors, not on PyTorch's current one. Rehearsed without any."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fla_longhorn.ops import triton as longhorn_triton
from fla_longhorn.ops.context_parallel import summaries


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
    """What stands for a tensor on the second of two GPUs."""
    return SimpleNamespace(device=torch.device('cuda:1'), shape=(1, 4, 1, 3))


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_ops(exact, entered, second, monkeypatch):
    name = 'exact' if exact else 'diagonal'
    for direction in ('fwd', 'bwd'):
        monkeypatch.setattr(longhorn_triton, f'{name}_{direction}', lambda *args, **options: list(entered))
    assert longhorn_triton.longhorn_fwd(*[second] * 4, exact=exact) == [1]
    assert longhorn_triton.longhorn_bwd(None, None, *[second] * 4, exact=exact) == [1]
    assert not entered


def test_summaries(entered, second, monkeypatch):
    monkeypatch.setattr(summaries, 'runs_on_triton', lambda device: True)
    monkeypatch.setattr(summaries, 'with_token_stride', lambda x: (x, 0))
    monkeypatch.setattr(summaries, 'prepare_rows', lambda *args, **options: None)
    monkeypatch.setattr(summaries, 'summarize', lambda *args, **options: (None, list(entered)))
    assert summaries.forward_summary(*[second] * 3, with_decay=True, use_beta_sigmoid=False)[1] == [1]
    assert summaries.backward_summary(
        *[second] * 5, None, None, scale=1.0, use_beta_sigmoid=False, parallel=True,
    ) == [1]
    assert not entered
