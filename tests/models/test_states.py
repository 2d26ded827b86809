"""What a cache remembers is in every copy of it: each row goes on as it does alone, without a cache."""

import copy
import pickle
from itertools import product

import pytest
import torch
from fla.models.utils import Cache

from fla_longhorn.modules.cache import RewindableCache
from tests.devices import slow_but
from tests.models.test_cache import build, contents, equal, make, near

OWN = {
    'diagonal': {},
    'exact': {'exact': True},
    'attention': {'attn': {'layers': [1], 'num_heads': 2}},
    'attention first': {'attn': {'layers': [0], 'num_heads': 2}},
    'small window': {'attn': {'layers': [1], 'num_heads': 2, 'window_size': 4}},
    'small window first': {'attn': {'layers': [0], 'num_heads': 2, 'window_size': 4}},
    'large window': {'attn': {'layers': [1], 'num_heads': 2, 'window_size': 16}},
}
MODELS = (*OWN, 'gla', 'gla hybrid', 'rwkv7 hybrid')
READ = 9


def load(tensors) -> RewindableCache:
    cache = RewindableCache()
    cache.load_state_dict(tensors)
    return cache


def in_a_file(cache, path):
    torch.save(cache.state_dict(), path)
    return load(torch.load(path, weights_only=True))


def of_dictionaries(cache, path):
    """fla's own cache, made of fla's states."""
    torch.save([dict(cache[i]) for i in range(len(cache))], path)
    made = Cache()
    for i, states in enumerate(torch.load(path, weights_only=True)):
        made.update(layer_idx=i, offset=READ, **{name: x for name, x in states.items() if x is not None})
    return made


def reordered(cache, path):
    for _ in range(2):
        cache.batch_select_indices(torch.arange(len(rows_of(cache)) - 1, -1, -1, device=rows_of(cache).device))
    return cache


def selected(cache, path):
    """Every row twice, and then the second of each."""
    n = len(rows_of(cache))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.arange(1, 2 * n, 2, device=rows_of(cache).device))
    return cache


def restored(cache, path):
    here = cache.snapshot()
    cache.reset()
    cache.restore(here)
    return cache


COPIES = {
    'file': in_a_file, 'dictionaries': of_dictionaries, 'pickle': lambda cache, path: pickle.loads(pickle.dumps(cache)),
    'deep copy': lambda cache, path: copy.deepcopy(cache), 'snapshot': lambda cache, path: cache.snapshot(),
    'restored': restored, 'reordered': reordered, 'selected': selected,
    'all': lambda cache, path: in_a_file(reordered(copy.deepcopy(cache).snapshot(), path), path),
}


def rows_of(cache) -> torch.Tensor:
    return next(x for layer in cache for name, x in layer.items() if name == 'conv_state' and x is not None)


def of(name: str, device):
    return build(device, num_hidden_layers=2, **OWN[name]) if name in OWN else make(name, device)


def batch(padded: bool, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows with padding in different places, or one without."""
    ids = torch.randint(3, 50, (3 if padded else 1, READ + 5), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2], mask[1, 5:7] = 0, 0
    return ids, mask


def alone(model, ids, mask, first: int) -> torch.Tensor:
    """Logits from column `first` on, which has no padding behind it."""
    rows = zip(ids, mask.bool(), strict=True)
    return torch.cat([model(row[kept][None], use_cache=False).logits[:, first - len(row):] for row, kept in rows])


@pytest.mark.parametrize('padded', [False, True], ids=['one prompt', 'padded'])
@pytest.mark.parametrize(('name', 'how'), slow_but(
    [*product(OWN, ('file', 'dictionaries')), *product(('small window', 'gla hybrid'), COPIES)], product(MODELS, COPIES),
))
@torch.no_grad()
def test_goes_on(name, how, padded, tmp_path, device):
    model, (ids, mask) = of(name, device), batch(padded, device)
    cache = COPIES[how](model(ids[:, :READ], mask[:, :READ], use_cache=True).past_key_values, tmp_path / 'states')
    assert all(cache.get_seq_length(i) == READ for i in range(len(cache))) or how == 'dictionaries'
    at, found = READ, []
    for n in (2, 1, 2):
        found.append(model(ids[:, at:at + n], mask[:, :at + n], past_key_values=cache, use_cache=True).logits)
        at += n
    assert near(torch.cat(found, 1), alone(model, ids, mask, READ))
    if padded and how != 'dictionaries':
        with pytest.raises(ValueError, match='attention_mask must repeat'):
            model(ids[:, :2], torch.ones(3, at + 2, device=device), past_key_values=cache)


@pytest.mark.parametrize('padded', [False, True], ids=['one prompt', 'padded'])
@pytest.mark.parametrize('name', slow_but(('diagonal', 'small window', 'gla hybrid'), MODELS))
@torch.no_grad()
def test_cropped_after_reordering(name, padded, device):
    """A crop goes back to snapshots whose rows are in the order of now."""
    model, (ids, mask) = of(name, device), batch(padded, device)
    cache = RewindableCache()
    cache.activate_past_recording()
    model(ids[:, :5], mask[:, :5], past_key_values=cache, use_cache=True)
    model(ids[:, 5:READ], mask[:, :READ], past_key_values=cache, use_cache=True)
    order = torch.tensor([1, 0, 0] if padded else [0, 0], device=device)
    cache.batch_select_indices(order)
    ids, mask = ids[order], mask[order]
    model(ids[:, READ:READ + 2], mask[:, :READ + 2], past_key_values=cache, use_cache=True)
    cache.crop(READ - cache.get_seq_length())
    assert near(
        model(ids[:, READ:], mask, past_key_values=cache.snapshot(), use_cache=True).logits, alone(model, ids, mask, READ),
    )
    # by another crop to before the order, from where the rest is read again
    cache = RewindableCache()
    cache.activate_past_recording()
    model(ids[:, :5], mask[:, :5], past_key_values=cache, use_cache=True)
    model(ids[:, 5:READ], mask[:, :READ], past_key_values=cache, use_cache=True)
    order = torch.arange(len(ids) - 1, -1, -1, device=device)
    cache.batch_select_indices(order)
    cache.crop(5)
    ids, mask = ids[order], mask[order]
    found = model(ids[:, 5:], mask, past_key_values=cache, use_cache=True).logits[:, READ - 5:]
    assert near(found, alone(model, ids, mask, READ))


@torch.no_grad()
def test_a_file_of_a_cropped_cache(tmp_path, device):
    """What the crop kept must be read again, also from the file."""
    model, (ids, _) = of('diagonal', device), batch(False, device)
    cache = RewindableCache()
    cache.activate_past_recording()
    for part in (ids[:, :4], ids[:, 4:READ]):
        model(part, past_key_values=cache, use_cache=True)
    cache.crop(7)
    with pytest.raises(ValueError, match='the 3 after them must be read again'):
        model(ids[:, :1], past_key_values=in_a_file(cache, tmp_path / 'states'))


@torch.no_grad()
def test_copies(device):
    """A dictionary changes neither with the cache that it was made of nor with those that it was loaded into."""
    model, (ids, mask) = of('small window', device), batch(True, device)
    cache = model(ids[:, :READ], mask[:, :READ], use_cache=True).past_key_values
    before, tensors = contents(cache), cache.state_dict()
    assert all(type(x) is torch.Tensor and x.is_contiguous() for x in tensors.values())
    first, second = load(tensors), load(tensors)
    for changed in (cache, first):
        model(ids[:, READ:READ + 1], mask[:, :READ + 1], past_key_values=changed, use_cache=True)
    equal(contents(second), before)
    equal(contents(load(tensors)), before)
    assert [layer.window_size for layer in second.layers] == [None, 4]


@pytest.mark.parametrize('change', [
    lambda tensors: tensors.pop('tokens'),
    lambda tensors: tensors.pop('missing'),
    lambda tensors: tensors.pop('1.attn_state.0'),
    lambda tensors: tensors.update({'0.state': tensors['tokens']}),
    lambda tensors: tensors.update({'3.conv_state': tensors['tokens']}),
    lambda tensors: tensors.update(model=tensors['tokens']),
])
@torch.no_grad()
def test_not_a_cache(change, device):
    tensors = of('attention', device)(batch(False, device)[0], use_cache=True).past_key_values.state_dict()
    change(tensors)
    cache = RewindableCache()
    with pytest.raises(ValueError, match=r'state_dict must be whole, as RewindableCache.state_dict makes it'):
        cache.load_state_dict(tensors)
    assert not len(cache)


@torch.no_grad()
def test_layers_that_have_not_read_as_much(device):
    """As from `Cache.update` without the number of tokens."""
    model, (ids, _) = of('small window', device), batch(False, device)
    cache, made = model(ids, use_cache=True).past_key_values, Cache()
    for i in range(2):
        made.update(layer_idx=i, **{name: x for name, x in cache[i].items() if x is not None})
    with pytest.raises(ValueError, match=r'past_key_values must have read as many tokens in each layer, got \[1, 4\]'):
        model(ids[:, :1], past_key_values=made)
