"""Mistakes that no run on the CPU notices, planted in the package: a run on the pretend device reports each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops.triton.diagonal import forward
from offgpu.pretend import counted

pytestmark = pytest.mark.usefixtures('kernels')


@pytest.fixture
def plant(monkeypatch):
    """`plant(owner, name, change)`: what this function of the package returns goes through `change`."""
    def plant(owner: Any, name: str, change: Callable) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(original(*args, **kwargs)))

    return plant


@pytest.fixture
def model() -> LonghornForCausalLM:
    config = LonghornConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    return LonghornForCausalLM(config).cuda()


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 32, (2, 4), generator=torch.Generator().manual_seed(seed)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :seed] = 0
    return dict(input_ids=ids, labels=ids, attention_mask=mask)


def train(model: LonghornForCausalLM) -> None:
    """Two batches with masks, whose graphs live together."""
    batches = [batch(seed) for seed in (1, 2)]
    sum(model(**x).loss for x in batches).backward()


@torch.no_grad()
def decode(model: LonghornForCausalLM) -> tuple[str, ...]:
    """Where the host waits in a decoded token."""
    ids = torch.ones(2, 4, dtype=torch.long, device='cuda')
    cache = model.eval()(ids, use_cache=True).past_key_values
    with counted() as counts:
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    return tuple(counts.stacks)


def test_a_tensor_made_on_the_cpu(model, plant):
    train(model)
    plant(Longhorn, 'by_heads', lambda x: x * torch.ones(1))
    with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'):
        train(model)


def test_a_wait_in_a_decoded_token(model, plant):
    assert decode(model) == ()
    plant(Longhorn, 'project', lambda inputs: inputs if inputs[0].isfinite().all().item() else None)
    stacks = decode(model)
    assert len(stacks) == 1 and 'fla_longhorn/layers/longhorn.py' in stacks[0] and '_local_scalar_dense' in stacks[0]


def call_op() -> torch.Tensor:
    q, k = torch.randn(2, 1, 5, 1, 4, device='cuda')
    v, beta = torch.randn(1, 5, 1, 8, device='cuda'), torch.rand(1, 5, 1, 8, device='cuda')
    return chunk_longhorn(q, k, v, beta)[0]


def test_memory_without_a_device(plant):
    assert call_op().is_cuda
    plant(forward, 'prepare_rows', torch.Tensor.cpu)
    with pytest.raises((RuntimeError, ValueError), match=r'cannot be accessed from Triton \(cpu tensor\?\)'):
        call_op()
