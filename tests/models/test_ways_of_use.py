"""Ways in which people train a model, own ones and swapped ones: the gradients of separate models without recomputation.

`tests/layers/test_ways_of_use.py` has the ways of a layer, against float64.
"""

import copy
import functools
from collections import defaultdict

import pytest
import torch
import torch.nn as nn
from transformers import AutoModelForCausalLM

from fla_longhorn.selfcheck.compare import relative_error
from tests.integration.swapped import make_config, tokens
from tests.layers.reference import replicate
from tests.layers.test_ways_of_use import in_threads
from tests.models.test_longhorn import small

MODELS = {
    'paper': {}, 'exact': {'exact': True, 'num_heads': 2, 'gate': 'head'},
    'attention': {'attn': {'layers': [1], 'num_heads': 2}, 'gate': 'channel', 'hidden_ratio': 2},
}


def make(name: str, recompute: bool, device) -> nn.Module:
    torch.manual_seed(0)
    if name == 'GLA':
        config = make_config('gla', longhorn_recompute=recompute, longhorn_exact=True)
    else:
        config = small(recompute=recompute, tie_word_embeddings=False, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    return model


def step(model: nn.Module, ids: torch.Tensor) -> None:
    model(ids, labels=ids, use_cache=False).loss.backward()


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def alone(make, ids) -> dict[str, torch.Tensor]:
    model = make(recompute=False)
    step(model, ids)
    return named(model)


def once(make, ids):
    model = make(recompute=True)
    step(model, ids)
    return named(model), alone(make, ids)


def one_block_for_all(make, ids):
    """Its gradients are the sums over blocks of equal weights."""
    def equal(recompute):
        model = make(recompute=recompute)
        for block in model.model.layers[1:]:
            if type(block.attn) is type(model.model.layers[0].attn):
                block.attn.load_state_dict(model.model.layers[0].attn.state_dict())
        return model

    model, apart = equal(True), equal(False)
    first = model.model.layers[0].attn
    for block in model.model.layers[1:]:
        if type(block.attn) is type(first):
            index, block.attn = block.attn.layer_idx, first
            assert index
    step(model, ids)
    step(apart, ids)
    wanted, found = defaultdict(int), named(model)
    for name, grad in named(apart).items():
        parts = name.split('.')
        shared = '.'.join([*parts[:2], '0', *parts[3:]])
        wanted[shared if name not in found and shared in found else name] += grad
    return found, wanted


def replicas(make, ids):
    """`nn.DataParallel`, which runs each replica in a thread."""
    model = make(recompute=True)
    copies = [replicate(model) for _ in ids]
    losses = [None] * len(copies)

    def run(i):
        losses[i] = copies[i](ids[i:i + 1], labels=ids[i:i + 1], use_cache=False).loss

    in_threads(run, len(copies))
    torch.stack(losses).mean().backward()
    return named(model), alone(make, ids)


def hooks(make, ids):
    model = make(recompute=True)
    for p in model.parameters():
        p.register_hook(lambda g: 0.5 * g)
    step(model, ids)
    return named(model), {name: 0.5 * g for name, g in alone(make, ids).items()}


def checkpoints(make, ids, use_reentrant):
    model = make(recompute=True)
    model.gradient_checkpointing_enable({'use_reentrant': use_reentrant})
    step(model, ids)
    return named(model), alone(make, ids)


def copied(make, ids):
    model = make(recompute=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    other = copy.deepcopy(model)
    step(other, ids)
    loss.backward()
    wanted = alone(make, ids)
    return named(model) | {f'{name}, copy': g for name, g in named(other).items()}, wanted | {
        f'{name}, copy': g for name, g in wanted.items()
    }


def shared_by_two(make, ids):
    model, other = make(recompute=True), make(recompute=True)
    other.model.layers = model.model.layers
    (model(ids, labels=ids, use_cache=False).loss + other(ids, labels=ids, use_cache=False).loss).backward()
    wanted = alone(make, ids)
    return named(model), {name: (2 if '.layers.' in name else 1) * g for name, g in wanted.items()}


WAYS = {
    'once': once, 'one block for all': one_block_for_all, 'replicas': replicas, 'hooks': hooks,
    'checkpoints': functools.partial(checkpoints, use_reentrant=False),
    'reentrant checkpoints': functools.partial(checkpoints, use_reentrant=True), 'copied': copied,
    'shared by two': shared_by_two,
}


@pytest.mark.parametrize('name', [*MODELS, 'GLA'])
@pytest.mark.parametrize('way', list(WAYS))
def test_gradients(way, name, device):
    found, wanted = WAYS[way](functools.partial(make, name, device=device), tokens(device, 2, 40) % 53)
    assert found.keys() == wanted.keys() and len(found) > 10
    errors = {key: relative_error(found[key], wanted[key]) for key in wanted}
    assert max(errors.values()) < 1e-4, errors
