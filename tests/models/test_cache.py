"""The models and fla's cache: a look ahead with `use_cache=False`, and caches that are not theirs."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.attn_mode import FAMILIES
from tests.integration.swapped import make_model, spread, with_slow
from tests.models.test_longhorn import small

VARIANTS = {
    'paper': {},
    'exact, mlp': {'exact': True, 'hidden_ratio': 2},
    'gate': {'gate': 'head', 'num_heads': 2},
    'exact, gate': {'gate': 'channel', 'exact': True, 'allow_neg_eigval': True},
    'hybrid': {'attn': {'layers': [1], 'num_heads': 2}},
    'window': {'attn': [{'layers': [0], 'num_heads': 4, 'window_size': 6},
                        {'layers': [2], 'num_heads': 4, 'num_kv_heads': 2, 'window_size': 6}]},
}

HYBRID = {'layers': [1], 'num_heads': 2, 'window_size': 6}
SWAPPED = [*FAMILIES, *(f'{family} hybrid' for family in FAMILIES)]


def build(device, **options) -> LonghornForCausalLM:
    """With weights large enough for what came before to show in the logits."""
    model = LonghornForCausalLM(small(**{'tie_word_embeddings': False, 'initializer_range': 1.0, **options})).to(device)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return model.eval()


def make(name: str, device):
    """A variant, or a family of fla's with Longhorn in it, `hybrid` with attention beside it."""
    if name in VARIANTS:
        return build(device, **VARIANTS[name])
    family, _, hybrid = name.partition(' ')
    return spread(make_model(family, device, attn=HYBRID if hybrid else None)).eval()


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((got - want).norm() <= 1e-5 * want.norm())


def contents(cache) -> list:
    return copy.deepcopy([(cache.get_seq_length(i), cache[i]) for i in range(len(cache))])


equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def states_of(cache) -> list[torch.Tensor]:
    return [x for layer in cache for x in layer.values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(('name', 'T', 'mode', 'base'), [
    *product(VARIANTS, [1, 70], [torch.enable_grad, torch.inference_mode], [False]),
    ('hybrid', 2, torch.no_grad, True),
    *((name, 1, torch.no_grad, False) for name in ('gla hybrid', 'linear_attn', 'rwkv7 hybrid')),
    *(pytest.param(name, 1, torch.no_grad, False, marks=pytest.mark.slow) for name in SWAPPED),
])
def test_a_look_ahead_changes_nothing(name, T, mode, base, device):
    """`use_cache=False` reads the cache: the same again gives the same, and decoding goes on as if it had not been."""
    model = make(name, device)
    model = model.model if base else model
    ids = torch.randint(3, 53, (2, 9 + T), device=device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for past, whole in ((None, None), (mask[:, :9], mask)):
        with torch.no_grad():
            cache = model(ids[:, :9], past, use_cache=True).past_key_values
        before, states = contents(cache), states_of(cache)
        options = {'past_key_values': cache, 'use_cache': False}
        with mode():
            first, again = (model(ids[:, 9:], whole, **options) for _ in range(2))
            assert model(ids[:, 9:], whole, **options, return_dict=False)[1] is cache
        assert first.past_key_values is cache
        assert torch.equal(first[0], again[0])
        equal(contents(cache), before)
        assert all(x is y for x, y in zip(states_of(cache), states, strict=True))
        with torch.no_grad():
            then = model(ids[:, 9:], whole, past_key_values=cache, use_cache=True)[0]
            assert near(then, model(ids, whole)[0][:, 9:])
        assert (first[0] - then).norm() <= 1e-6 * then.norm()
        assert all(cache.get_seq_length(i) == 9 + T for i in range(len(cache)))


@pytest.mark.parametrize('detached', [False, True], ids=['', 'detached'])
@pytest.mark.parametrize('name', list(VARIANTS))
def test_a_document_in_parts(name, detached, device):
    """A cache carries gradients from part to part, up to where it is detached."""
    model = build(device, **VARIANTS[name]).train()
    ids = torch.randint(3, 53, (2, 80), device=device)
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)

    def loss(first, last, cache):
        part = slice(first, last)
        options = dict(shift_labels=targets[:, part], num_items_in_batch=158, use_cache=True, past_key_values=cache)
        return model(ids[:, part], **options)

    def gradients(*losses):
        model.zero_grad()
        sum(losses).backward()
        return torch.cat([x.grad.flatten() for x in model.parameters()])

    first = loss(0, 50, None)
    if detached:
        first.past_key_values.detach()
    got = gradients(first.loss, loss(50, 80, first.past_key_values).loss)
    if detached:
        with torch.no_grad():
            cache = loss(0, 50, None).past_key_values
        want = gradients(loss(0, 50, None).loss, loss(50, 80, cache).loss)
    else:
        want = gradients(loss(0, 80, None).loss)
    assert (got - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize('name', ['paper', 'gla'])
def test_cache_of_another_number_of_layers(name, device):
    model, ids = make(name, device), torch.randint(3, 53, (2, 9), device=device)
    N = model.config.num_hidden_layers
    for n in (N - 1, N + 1):
        cache = model(ids, use_cache=True).past_key_values
        cache.layers = [*cache.layers, cache.layers[0]][:n]
        with pytest.raises(ValueError, match=f'past_key_values must hold the states of {N} layers, got {n}'):
            model(ids[:, :1], past_key_values=cache)


def test_cache_of_another_kind_of_layers(device):
    ids = torch.randint(3, 53, (2, 9), device=device)
    cache = build(device, attn={'layers': [1], 'num_heads': 2})(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match='past_key_values must hold a recurrent_state .* in layer 1, got NoneType'):
        build(device)(ids[:, :1], past_key_values=cache)
    cache = build(device)(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match='past_key_values must hold attention states in layer 1'):
        build(device, attn={'layers': [1], 'num_heads': 2})(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize('name', with_slow([*VARIANTS, *SWAPPED]))
def test_by_either_name(name, device):
    """transformers calls the cache `cache` from 5.24 on, and fla `past_key_values`."""
    model, ids = make(name, device), torch.randint(3, 50, (2, 12), device=device)
    with torch.no_grad():
        for part in (model, model.base_model):
            cache = part(ids[:, :8], use_cache=True).past_key_values
            continued, again = (part(ids[:, 8:], **{x: copy.deepcopy(cache)})[0] for x in ('cache', 'past_key_values'))
            equal(continued, again)
            assert not near(continued, part(ids[:, 8:], cache=None)[0])
            with pytest.raises(ValueError, match='cache must be None'):
                part(ids[:, 8:], cache=cache, past_key_values=cache)
