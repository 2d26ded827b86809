"""A cache that goes back: to a snapshot, by crops while it records, and in assisted generation."""

import copy

import pytest
import torch

from fla_longhorn.modules.cache import RewindableCache
from tests.devices import slow_but
from tests.models.test_cache import VARIANTS, build, contents, equal, make

some = pytest.mark.parametrize('name', slow_but(('paper', 'hybrid', 'gla'), [*VARIANTS, 'gla', 'linear_attn', 'rwkv7']))


def read(model, ids, cache, *lengths):
    """The tokens in pieces of these lengths."""
    at = cache.get_seq_length()
    for n in lengths:
        output = model(ids[:, at:at + n], past_key_values=cache, use_cache=True)
        at += n
    return output.logits


@some
@torch.no_grad()
def test_cropped(name, device):
    """As if the tokens had never been read, whatever the pieces; and it goes on from there.

    The argument of older versions of transformers is the length to keep, that of newer ones minus what to remove; that of 5.17
    is a tensor.
    """
    model, ids = make(name, device), torch.randint(3, 50, (2, 30), device=device)
    for keep, pieces in ((7, [4] + [1] * 10), (5, [3, 2, 1, 1, 5]), (12, [12, 2]), (6, [6, 8])):
        cache, expected = RewindableCache(), RewindableCache()
        cache.activate_past_recording()
        read(model, ids, cache, *pieces)
        total = sum(pieces)
        cache.crop(torch.tensor(keep - total, device=device) if total % 2 else keep)
        assert cache.get_seq_length() == keep and cache.missing == 0
        read(model, ids, expected, keep)
        want = read(model, ids, expected, 5)
        assert (read(model, ids, cache, 5) - want).norm() <= 1e-4 * want.norm()


@torch.no_grad()
def test_cropped_inside_a_call(device):
    """The cache is at the start of that call, and says so until the tokens are read again."""
    model, ids = make('paper', device), torch.randint(3, 50, (1, 12), device=device)
    cache = RewindableCache()
    cache.activate_past_recording()
    read(model, ids, cache, 4)
    before = contents(cache)
    read(model, ids, cache, 5)
    cache.crop(-2)
    equal(contents(cache), before)
    with pytest.raises(ValueError, match='cropped inside a call and has 4 tokens: the 3 after them must be read again'):
        read(model, ids, cache, 1)
    options = {'max_new_tokens': 4, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), model.generate(ids, **options))


@pytest.mark.parametrize('change', [
    lambda cache, rows: cache.reorder_cache(rows), lambda cache, rows: cache.batch_select_indices(rows),
], ids=['reordered', 'selected'])
@torch.no_grad()
def test_cropped_after_rows_move(change, device):
    """What was recorded before has the rows where they were: a crop goes back to what was recorded since, or raises."""
    model, ids, rows = make('paper', device), torch.randint(3, 50, (2, 12), device=device), torch.tensor([1, 0], device=device)
    cache, expected = RewindableCache(), RewindableCache()
    cache.activate_past_recording()
    read(model, ids, cache, 4, 2)
    change(cache, rows)
    with pytest.raises(RuntimeError, match='crop can only remove tokens that were recorded, got a length of 4 of 6'):
        cache.crop(-2)
    read(model, ids[rows], cache, 3)
    cache.crop(-3)
    read(model, ids[rows], expected, 6)
    want = read(model, ids[rows], expected, 3)
    assert (read(model, ids[rows], cache, 3) - want).norm() <= 1e-4 * want.norm()


@some
@torch.no_grad()
def test_snapshot(name, device):
    """Two ways to go on from it, and the cache itself, as from copies."""
    model, ids = make(name, device), torch.randint(3, 50, (2, 30), device=device)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    here, copied = cache.snapshot(), copy.deepcopy(cache)
    before = contents(here)
    outputs = [read(model, ids, cache, 1, 1, 4)]
    for _ in range(2):
        equal(contents(here), before)
        cache.restore(here)
        outputs.append(read(model, ids, cache, 1, 1, 4))
    outputs.append(read(model, ids, copied, 1, 1, 4))
    assert all(torch.equal(x, outputs[0]) for x in outputs)
    assert torch.equal(read(model, ids, here, 1, 1, 4), outputs[0])


def assistance(model, name: str, by: str, device) -> dict:
    """Guesses from the prompt's own words, from a model that is right and from one that is often wrong."""
    if by == 'prompt lookup':
        return {'prompt_lookup_num_tokens': 4}
    assistant = copy.deepcopy(model)
    if by == 'another':
        assistant = build(device, num_hidden_layers=1) if name in VARIANTS else make('gla', device)
    assistant.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0,
    )
    return {'assistant_model': assistant}


@some
@pytest.mark.parametrize('by', ['prompt lookup', 'itself', 'another'])
def test_assisted_generation(name, by, device):
    """The tokens of greedy decoding, in fewer calls where the guesses are good; then the cache is continued without."""
    model = make(name, device)
    ids = torch.randint(3, 50, (1, 6), device=device).repeat(1, 4)
    options = {'use_cache': True, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    want = model.generate(ids, max_new_tokens=28, **options)
    guesses, lengths = assistance(model, name, by, device), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs['input_ids'].shape[1]), with_kwargs=True,
    )
    got = model.generate(ids, max_new_tokens=24, **options, **guesses, return_dict_in_generate=True)
    assert torch.equal(got.sequences, want[:, :-4])
    # the calls read guesses, some of which are cropped
    assert max(lengths[1:]) > 1 and len(lengths) <= 24
    if by == 'itself':
        assert len(lengths) <= 5
    cache = got.past_key_values
    mask = torch.ones_like(got.sequences)
    options |= {'attention_mask': mask, 'max_new_tokens': 4}
    assert torch.equal(model.generate(got.sequences, past_key_values=cache, **options), want)
    assert not cache.past


def test_what_a_crop_kept_cannot_be_skipped(device):
    """Neither by a call that stores nothing, nor by a snapshot of the cropped cache."""
    model, ids = build(device), torch.randint(3, 50, (1, 12), device=device)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        cache.activate_past_recording()
        model(ids[:, 4:10], past_key_values=cache, use_cache=True)
        cache.crop(7)
        snapshot = cache.snapshot()
        for use_cache in (False, True):
            with pytest.raises(ValueError, match='the 3 after them must be read again'):
                model(ids[:, 7:], past_key_values=cache, use_cache=use_cache)
            cache.restore(snapshot)


def test_a_mask_after_assisted_generation_is_compared(device):
    model, ids = build(device), torch.randint(3, 50, (1, 6), device=device).repeat(1, 4)
    got = model.generate(
        ids, max_new_tokens=6, do_sample=False, eos_token_id=None, prompt_lookup_num_tokens=4, return_dict_in_generate=True,
    )
    mask = torch.ones_like(got.sequences)
    mask[:, :3] = 0
    with pytest.raises(ValueError, match='attention_mask must repeat'):
        model(got.sequences[:, -1:].repeat(1, 2), torch.cat([mask, mask[:, -1:]], 1), past_key_values=got.past_key_values)


@pytest.mark.parametrize('name', ['paper', 'hybrid'])
def test_a_list_of_states_is_refused(name, device):
    """Which does not tell how many tokens were read."""
    model, ids = make(name, device), torch.randint(3, 50, (1, 4), device=device)
    states = model(ids, use_cache=True).past_key_values.to_legacy_cache()
    with pytest.raises(TypeError, match="past_key_values must be None for a new cache or one of fla's"):
        model(ids, past_key_values=states, use_cache=True)
