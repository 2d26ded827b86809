"""Tensor parallelism on four ranks: losses, gradients, generation and checkpoints are those of one process.

    python -m packages.extras.tests.distributed.test_parallel options|curves|transformers FOLDER

is what the ranks run, beside FSDP2 and context parallelism. What differs is an error. Checkpoints stay in the folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from fla.ops.cp import build_cp_context
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.selfcheck.compare import relative_error
from fla_longhorn_extras.tensor_parallel import tensor_parallel_plan
from tests import forks
from tests.models.test_gate import gates, sharded_on_meta
from tests.ranks import fork

pytestmark = pytest.mark.slow

# of models on two ranks
OPTIONS: dict[str, dict[str, Any]] = {
    'paper': {},
    'exact': {'exact': True},
    'heads': {'num_heads': 4, 'state_size': 3},
    'scalar_beta': {'scalar_beta': True},
    'scalar_beta, heads': {'scalar_beta': True, 'num_heads': 4, 'exact': True},
    'k_norm': {'k_norm': 'l2'},
    'tie_qk': {'tie_qk': True, 'k_norm': 'l2'},
    'value_proj': {'value_proj': True},
    'bias': {'use_bias': True, 'conv_bias': False},
    'MLP': {'intermediate_size': 64},
    'attention': {'attn': {'layers': [1], 'num_heads': 4, 'num_kv_heads': 2, 'qkv_bias': True}, 'value_proj': True},
    'head not tied': {'tie_word_embeddings': False},
    'head fused with the loss': {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True},
    'norms not fused': {'fuse_norm': False},
    'gate per head': {'gate': 'head', 'num_heads': 4},
    'gate per head, exact': {'gate': 'head', 'num_heads': 4, 'exact': True, 'scalar_beta': True, 'allow_neg_eigval': True},
    'gate per channel': {'gate': 'channel', 'num_heads': 4, 'allow_neg_eigval': True},
    'gate per channel, exact': {'gate': 'channel', 'num_heads': 4, 'exact': True},
}
# of parts of a head on four ranks, and of whole heads
ON_FOUR = {
    'heads in parts': {'num_heads': 2, 'scalar_beta': True}, 'one head in parts': {}, 'whole heads': {'num_heads': 8},
    'gate of heads in parts': {'num_heads': 2, 'gate': 'head'},
    'gate of channels of heads in parts': {'num_heads': 2, 'gate': 'channel', 'exact': True},
}
HYBRID = {
    'num_heads': 4, 'intermediate_size': 64, 'attn': {'layers': [1], 'num_heads': 4}, 'value_proj': True, 'use_bias': True,
}
# the second one's decays are of parts of heads
GATED = {
    'gate per head': {'num_heads': 4, 'gate': 'head', 'exact': True, 'allow_neg_eigval': True},
    'gate per channel': {'num_heads': 2, 'gate': 'channel'},
}
# how `from_pretrained` splits
SPLITS = {'tensor': {'tp_plan': 'auto'}, 'FSDP2, tensor': {'distributed_config': DistributedConfig(tp_size=2, fsdp_size=2)}}
# boundaries of packed sequences, of all ranks of context parallelism together
BOUNDARIES = (0, 30, 96, 160)
STEPS = 20


def make_model(layers: int = 2, **options: Any) -> LonghornForCausalLM:
    torch.manual_seed(0)
    config = LonghornConfig(hidden_size=32, num_hidden_layers=layers, vocab_size=50, state_size=6)
    model = LonghornForCausalLM(LonghornConfig(**{**config.to_dict(), **options})).train()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return model


def make_batches() -> torch.Tensor:
    """A batch of four rows for each step, which count modulo 50 from a start and in a step of their own."""
    generator = torch.Generator().manual_seed(1)
    starts, strides = (torch.randint(1, most, (STEPS, 4, 1), generator=generator) for most in (50, 4))
    return (starts + strides * torch.arange(40)) % 50


def split_channels(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh, tensor_parallel_plan(model))
    return model


def compare(name: str, model: LonghornForCausalLM, reference: LonghornForCausalLM, length: int) -> None:
    """The loss and each gradient, after a backward pass of both."""
    ids = make_batches()[0, :2].repeat(1, 2)[:, :length]
    losses = [m(ids, labels=ids).loss for m in (model, reference)]
    for loss in losses:
        loss.backward()
    grads = {x: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for x, p in model.named_parameters()}
    wanted = {name: x.grad for name, x in reference.named_parameters()}
    assert grads.keys() == wanted.keys(), name
    assert relative_error(*(loss.detach() for loss in losses)) <= 1e-6, name
    assert max(relative_error(grads[x], wanted[x]) for x in wanted) <= 1e-4, name


def options(mesh: DeviceMesh, world: DeviceMesh, folder: Path) -> None:
    # each pair of ranks takes every other one
    for i, (name, options) in enumerate(OPTIONS.items()):
        if i % 2 == mesh['dp'].get_local_rank():
            model = split_channels(make_model(**options), mesh['tp'])
            assert all(isinstance(x, DTensor) for x in model.parameters())
            # the lengths select both operators
            compare(name, model, make_model(**options), 70 if i % 4 < 2 else 40)
    for name, options in ON_FOUR.items():
        compare(name, split_channels(make_model(**options), world), make_model(**options), 40)


def shard(model: LonghornForCausalLM, mesh: DeviceMesh) -> LonghornForCausalLM:
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable,
    batches: Iterable[torch.Tensor],
    ranks: DeviceMesh | None = None,
    max_norm: float = 1.0,
) -> list[float]:
    """Losses of each step, with the norm of all gradients clipped; `ranks` each have a part of the loss, averaged."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        loss = loss.detach().clone()
        if ranks is not None:
            dist.all_reduce(loss, group=ranks.get_group())
            loss /= ranks.size()
        losses.append(loss.item())
    return losses


def rows(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch, labels=batch).loss


def packed(model: nn.Module, batch: torch.Tensor, cp: DeviceMesh | None = None, bounds: tuple = BOUNDARIES) -> torch.Tensor:
    """The mean over all tokens of a rank's sum, times the number of ranks."""
    ids, boundaries = batch.view(1, -1), torch.tensor(bounds)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, boundaries[1:] - 1] = -100
    n, rank = (1, 0) if cp is None else (cp.size(), cp.get_local_rank())
    kwargs = {'cu_seqlens': boundaries} if cp is None else {'cp_context': build_cp_context(boundaries, cp.get_group())}
    logits = model(ids.chunk(n, 1)[rank], use_cache=False, **kwargs).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.chunk(n, 1)[rank].flatten(), reduction='sum')
    return loss * n / (labels != -100).sum()


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **options: Any) -> None:
    state = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / 'dcp', **options)
    set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optimizer'])


def curve(loss_of: Callable, max_norm: float = 1.0, layers: int = 2, **options: Any) -> list[float]:
    """The losses of one process."""
    model = make_model(layers, **options)
    return train(model, make_optimizer(model), loss_of, make_batches(), max_norm=max_norm)


def assert_same(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0.)


def curves(mesh: DeviceMesh, world: DeviceMesh, folder: Path) -> None:
    """Losses of training, by how it is split; the second half again after a checkpoint of another split."""
    batches, half = make_batches(), STEPS // 2
    dp, tp = mesh['dp'], mesh['tp']

    def rows_of_rank(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return rows(model, batch.chunk(dp.size())[dp.get_local_rank()])

    expected = curve(rows, intermediate_size=64)
    assert expected[-1] < 0.8 * expected[0]
    model = shard(split_channels(make_model(intermediate_size=64), tp), dp)
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, rows_of_rank, batches[:half], dp)
    dcp.save(dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder / 'dcp')
    assert_same(losses + train(model, optimizer, rows_of_rank, batches[half:], dp), expected)

    model = split_channels(make_model(intermediate_size=64), world)
    optimizer = make_optimizer(model)
    load_checkpoint(model, optimizer, folder)
    assert_same(train(model, optimizer, rows, batches[half:]), expected[half:])

    for exact in False, True:
        model = shard(split_channels(make_model(exact=exact, num_heads=2), tp), dp)
        losses = train(model, make_optimizer(model), lambda model, batch: packed(model, batch, dp), batches, dp)
        assert_same(losses, curve(packed, exact=exact, num_heads=2))


def by_transformers(mesh: DeviceMesh, world: DeviceMesh, folder: Path) -> None:
    """`from_pretrained` that splits, training, generation, `save_pretrained`."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    reference = make_model(3, **HYBRID)
    if rank == 0:
        reference.save_pretrained(folder / 'whole')
    dist.barrier()
    for name, kwargs in SPLITS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / 'whole', **kwargs).train()
        split = {x for x, p in model.named_parameters() if isinstance(p, DTensor)}
        # transformers leaves norms as they are
        assert split == {x for x, _ in reference.named_parameters() if 'FSDP2' in name or 'norm' not in x}, name
        reference.zero_grad()
        compare(name, model, reference, 70)
        model.save_pretrained(folder / name)
    for name, options in GATED.items():
        gated = make_model(**options)
        if rank == 0:
            gated.save_pretrained(folder / name)
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(folder / name, tp_plan='auto').train()
        # what all ranks have is left as it is, as norms are
        whole = ('norm', 'A_log', *(('gate.up', 'dt_bias') if options['gate'] == 'head' else ()))
        split = {x for x, p in model.named_parameters() if isinstance(p, DTensor)}
        wanted = {x for x, _ in gated.named_parameters() if not any(part in x for part in whole)}
        assert split == wanted, (name, split ^ wanted)
        compare(name, model, gated, 70)
        prompt, settings = make_batches()[0, :2, :12], {'max_new_tokens': 12, 'do_sample': False, 'eos_token_id': None}
        assert torch.equal(*(m.eval().generate(prompt, **settings) for m in (model, gated))), name
    model = AutoModelForCausalLM.from_pretrained(folder / 'whole', tp_plan='auto').eval()
    reference.eval()
    prompt = make_batches()[0, :2, :12]
    # padding on the left of the second row
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    settings = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assisted = {'prompt_lookup_num_tokens': 3, 'attention_mask': mask[1:]}
    for tokens, more in (prompt, {}), (prompt[1:], assisted):
        assert torch.equal(*(m.generate(tokens, **settings | more) for m in (model, reference))), more
    cache = model(prompt, use_cache=True).past_key_values
    # a head of four, of 16 channels
    assert cache[0]['recurrent_state'].shape == (2, 1, 6, 16) and cache[0]['conv_state'].shape == (2, 16, 4)


JOBS = {'options': options, 'curves': curves, 'transformers': by_transformers}


def main(name: str, folder: str) -> None:
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    world = init_device_mesh('cpu', (4,), mesh_dim_names=('tp',))
    JOBS[name](mesh, world, Path(folder))


@pytest.mark.parametrize('name', ['options'])
def test_equals_one_process(name, tmp_path):
    forks.output('-m', 'packages.extras.tests.distributed.test_parallel', name, tmp_path)


def test_curves_and_a_checkpoint_in_one_process(tmp_path):
    forks.output('-m', 'packages.extras.tests.distributed.test_parallel', 'curves', tmp_path)
    model = make_model(intermediate_size=64)
    optimizer, half = make_optimizer(model), STEPS // 2
    load_checkpoint(model, optimizer, tmp_path, no_dist=True)
    losses = train(model, optimizer, rows, make_batches()[half:])
    assert_same(losses, curve(rows, intermediate_size=64)[half:])


def test_transformers(tmp_path):
    forks.output('-m', 'packages.extras.tests.distributed.test_parallel', 'transformers', tmp_path)
    for name in SPLITS:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for key, x in make_model(3, **HYBRID).state_dict().items():
            assert torch.equal(saved[key], x), key


@gates
def test_sharded_on_meta(gate, tmp_path):
    def shard(model, mesh):
        parallelize_module(model, mesh, tensor_parallel_plan(model))

    sharded_on_meta('longhorn', gate, tmp_path, shard)


if __name__ == '__main__':
    fork(main, 4, *sys.argv[1:])
