"""Tensor and pipeline parallelism on four ranks, beside FSDP2 and context parallelism: writes what it finds to a folder.

    python -m tests.distributed.scripts.parallel FOLDER [JOB ...]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from fla.ops.cp import build_cp_context
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.models import tensor_parallel_plan
from tests.distributed.scripts.launch import fork
from tests.ops.cases import relative_error

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
}
# of parts of a head on four ranks, and of whole heads
ON_FOUR = {'heads in parts': {'num_heads': 2, 'scalar_beta': True}, 'one head in parts': {}, 'whole heads': {'num_heads': 8}}
HYBRID = {
    'num_heads': 4, 'intermediate_size': 64, 'attn': {'layers': [1], 'num_heads': 4}, 'value_proj': True, 'use_bias': True,
}
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


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def split_channels(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh, tensor_parallel_plan(model))
    return model


def differences(model: LonghornForCausalLM, reference: LonghornForCausalLM, length: int) -> dict[str, float]:
    """Of the loss and of each gradient, after a backward pass of both."""
    ids = make_batches()[0, :2].repeat(1, 2)[:, :length]
    losses = [m(ids, labels=ids).loss for m in (model, reference)]
    for loss in losses:
        loss.backward()
    grads = {name: full(x.grad) for name, x in model.named_parameters()}
    wanted = {name: x.grad for name, x in reference.named_parameters()}
    assert grads.keys() == wanted.keys()
    errors = {name: relative_error(grads[name], wanted[name]) for name in wanted}
    return {'loss': relative_error(*(loss.detach() for loss in losses)), **errors}


def options(tp: DeviceMesh, dp_rank: int, world: DeviceMesh) -> dict[str, dict[str, float]]:
    found = {}
    # each pair of ranks takes every other one
    for i, (name, options) in enumerate(OPTIONS.items()):
        if i % 2 == dp_rank:
            model = split_channels(make_model(**options), tp)
            assert all(isinstance(x, DTensor) for x in model.parameters())
            # both operators
            found[name] = differences(model, make_model(**options), 70 if i % 4 < 2 else 40)
    for name, options in ON_FOUR.items():
        found[f'{name}, four ranks'] = differences(split_channels(make_model(**options), world), make_model(**options), 40)
    return found


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


def curves(mesh: DeviceMesh, world: DeviceMesh, folder: Path) -> dict[str, list[float]]:
    """Losses of training, by how it is split; the second half again after a checkpoint of another split."""
    batches, found, half = make_batches(), {}, STEPS // 2
    dp, tp = mesh['dp'], mesh['tp']

    def rows_of_rank(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return rows(model, batch.chunk(dp.size())[dp.get_local_rank()])

    model = shard(split_channels(make_model(intermediate_size=64), tp), dp)
    optimizer = make_optimizer(model)
    found['FSDP2, tensor'] = train(model, optimizer, rows_of_rank, batches[:half], dp)
    dcp.save(dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder / 'dcp')
    found['FSDP2, tensor'] += train(model, optimizer, rows_of_rank, batches[half:], dp)

    model = split_channels(make_model(intermediate_size=64), world)
    optimizer = make_optimizer(model)
    state = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / 'dcp')
    set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optimizer'])
    found['tensor, from the checkpoint'] = train(model, optimizer, rows, batches[half:])

    for exact in False, True:
        model = shard(split_channels(make_model(exact=exact, num_heads=2), tp), dp)
        losses = train(model, make_optimizer(model), lambda model, batch: packed(model, batch, dp), batches, dp)
        found[f'context, FSDP2, tensor, {"exact" if exact else "diagonal"}'] = losses
    return found


def by_transformers(world: DeviceMesh, folder: Path) -> dict[str, Any]:
    """`from_pretrained` that splits, training, generation, `save_pretrained`."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    reference = make_model(3, **HYBRID)
    if rank == 0:
        reference.save_pretrained(folder / 'whole')
    dist.barrier()
    found: dict[str, Any] = {}
    calls = {'tensor': {'tp_plan': 'auto'}, 'FSDP2, tensor': {'distributed_config': DistributedConfig(tp_size=2, fsdp_size=2)}}
    for name, kwargs in calls.items():
        model = AutoModelForCausalLM.from_pretrained(folder / 'whole', **kwargs).train()
        found[f'split, {name}'] = [x for x, p in model.named_parameters() if isinstance(p, DTensor)]
        reference.zero_grad()
        found[name] = differences(model, reference, 70)
        model.save_pretrained(folder / name)
    model = AutoModelForCausalLM.from_pretrained(folder / 'whole', tp_plan='auto').eval()
    reference.eval()
    prompt = make_batches()[0, :2, :12]
    # padding on the left of the second row
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    settings = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    assisted = {'prompt_lookup_num_tokens': 3, 'attention_mask': mask[1:]}
    for name, tokens, more in ('greedy', prompt, {}), ('prompt lookup', prompt[1:], assisted):
        found[f'generated, {name}'] = [m.generate(tokens, **settings | more).tolist() for m in (model, reference)]
    cache = model(prompt, use_cache=True).past_key_values
    found['cached'] = [list(cache[i][x].shape) for i, x in ((0, 'recurrent_state'), (0, 'conv_state'))]
    return found


class Stage(nn.Module):
    """Some of a model's blocks, from what the stage before returns to what the next one takes."""

    def __init__(self, model: LonghornForCausalLM, first: bool, last: bool, blocks: slice) -> None:
        super().__init__()
        self.model = model
        model.model.layers = model.model.layers[blocks]
        if not first:
            model.model.embeddings = nn.Identity()
        if not last:
            model.model.norm = model.lm_head = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x, use_cache=False, return_dict=False)[0]


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Logits(nn.Module):
    def __init__(self, model: LonghornForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def two_stages(mesh: DeviceMesh) -> dict[str, list[float]]:
    """Losses of a pipeline, whose second stage knows them: written by hand, its channels split, and cut out of a trace."""
    pp, found = mesh['dp'], {}
    index, last, device = pp.get_local_rank(), pp.get_local_rank() == 1, torch.device('cpu')
    for name in 'by hand, tensor', 'traced':
        model = make_model(3, tie_word_embeddings=False, num_heads=2)
        if name == 'traced':
            cut = {'model.model.layers.1': SplitPoint.BEGINNING}
            traced = pipeline(Logits(model), (make_batches()[0, :2],), split_spec=cut)
            stage = traced.build_stage(index, device, pp.get_group())
        else:
            split_channels(model, mesh['tp'])
            module = Stage(model, not last, last, slice(1, 3) if last else slice(1))
            stage = PipelineStage(module, index, 2, device, group=pp.get_group())
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=next_token_loss)
        optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
        curve = []
        for batch in make_batches():
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if last:
                schedule.step(target=batch, losses=losses)
                curve.append(torch.stack(losses).mean().item())
            else:
                schedule.step(batch)
            optimizer.step()
        if last:
            found[name] = curve
    return found


def main(folder: str, *names: str) -> None:
    path = Path(folder)
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    world = init_device_mesh('cpu', (4,), mesh_dim_names=('tp',))
    jobs = {
        'options': lambda: options(mesh['tp'], mesh['dp'].get_local_rank(), world),
        'curves': lambda: curves(mesh, world, path),
        'transformers': lambda: by_transformers(world, path),
        'pipeline': lambda: two_stages(mesh),
    }
    for name, job in jobs.items():
        if names and name not in names:
            continue
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, job())
        if dist.get_rank() == 0:
            merged = {key: value for one in found for key, value in one.items()}
            (path / f'{name}.json').write_text(json.dumps(merged))


if __name__ == '__main__':
    fork(main, 4, *sys.argv[1:])
