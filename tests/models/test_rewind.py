"""A cache that goes back: cropped while it records, restored from a snapshot, and in assisted generation."""

import copy

import pytest
import torch

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.modules.rewind import RewindableCache
from tests.integration.swapped import make_model, spread
from tests.models.test_cache import VARIANTS, build, contents, equal, make

# what their other parts keep of a piece, one can't read a part of
WHOLE = {
    'rwkv6': 'ffn_state', 'rwkv7': 'ffn_state', 'rodimus': 'recurrent_state, conv_state',
}
some = pytest.mark.parametrize('name', [*VARIANTS, 'gla', 'linear_attn', 'deltaformer'])
variants = pytest.mark.parametrize('name', list(VARIANTS))


def caches() -> tuple[RewindableCache, RewindableCache]:
    """One that records, and one that does not."""
    recording = RewindableCache()
    recording.activate_past_recording()
    return recording, RewindableCache()


def read(model, ids, cache, *lengths, mask=None):
    """The tokens in pieces of these lengths."""
    at = cache.get_seq_length()
    for n in lengths:
        options = {} if mask is None else {'attention_mask': mask[:, :at + n]}
        output = model(ids[:, at:at + n], past_key_values=cache, use_cache=True, **options)
        at += n
    return output.logits


PIECES = {'one piece': [14], 'by token': [4] + [1] * 10, 'mixed': [3, 4, 1, 1, 5], 'long': [14]}


@pytest.mark.parametrize(('name', 'pieces'), [
    *((name, pieces) for name in VARIANTS for pieces in PIECES),
    *((name, 'mixed') for name in FAMILIES if name not in WHOLE),
])
@torch.no_grad()
def test_cropped(name, pieces, device):
    """As if the tokens had never been read, whatever the pieces; and it goes on from there."""
    model, ids = make(name, device), torch.randint(3, 50, (2, 90), device=device)
    start = 70 if pieces == 'long' else 0
    for length in {start + 3, start + 7, start + 8, start + 14}:
        cache, expected = caches()
        if start:
            read(model, ids, cache, start)
            cache.crop(0)
        read(model, ids, cache, *PIECES[pieces])
        cache.crop(length - start - 14)
        assert cache.get_seq_length() == length
        read(model, ids, expected, length)
        torch.testing.assert_close(contents(cache), contents(expected))
        want = read(model, ids, expected, 5)
        assert (read(model, ids, cache, 5) - want).norm() <= 1e-4 * want.norm()


@variants
@torch.no_grad()
def test_cropped_again_and_again(name, device):
    """The argument of older versions of transformers, the length to keep, and that of newer ones, minus what to remove.

    That of 5.17 is a tensor.
    """
    model, ids = make(name, device), torch.randint(3, 50, (1, 40), device=device)
    for newer in (False, True):
        cache, expected = caches()
        for piece, keep in ((9, 9), (6, 1), (6, 2), (1, 1), (6, 5), (3, 1)):
            before = cache.get_seq_length()
            read(model, ids, cache, piece)
            cache.crop(torch.tensor(keep - piece, device=device) if newer else before + keep)
            read(model, ids, expected, keep)
            torch.testing.assert_close(contents(cache), contents(expected))


@pytest.mark.parametrize('name', ['paper', 'exact, mlp', 'hybrid', 'window'])
@pytest.mark.parametrize('side', ['left', 'middle', 'right'])
@torch.no_grad()
def test_cropped_rows_with_padding(name, side, device):
    model, ids = make(name, device), torch.randint(3, 50, (3, 12), device=device)
    mask = torch.ones_like(ids)
    mask[1, {'left': slice(0, 4), 'middle': slice(3, 8), 'right': slice(9, 12)}[side]] = 0
    for length in (5, 6, 9, 11):
        cache, expected = caches()
        read(model, ids, cache, 6, 6, mask=mask)
        cache.crop(length)
        read(model, ids, expected, length, mask=mask)
        if name not in ('hybrid', 'window'):
            # keys have positions once a mask had padding, which the shorter piece may not have had
            torch.testing.assert_close(contents(cache), contents(expected))
        got, want = (read(model, ids, x, 12 - length, mask=mask) for x in (cache, expected))
        kept = mask[:, length:].bool()
        assert (got - want)[kept].norm() <= 1e-5 * want[kept].norm()


@variants
@pytest.mark.parametrize('start', [0, 6])
@torch.no_grad()
def test_cropped_to_padding_of_all_rows(name, start, device):
    """Where a piece begins with padding, as assisted generation has it when the padding's token was generated."""
    model, ids = make(name, device), torch.randint(3, 50, (2, 12), device=device)
    mask = torch.ones_like(ids)
    mask[:, start:start + 3] = 0
    cache, expected = caches()
    read(model, ids, cache, *[start] * (start > 0), 6, mask=mask)
    cache.crop(start + 2)
    read(model, ids, expected, *[start] * (start > 0), 2, mask=mask)
    want = read(model, ids, expected, 4, mask=mask)
    got = read(model, ids, cache, 4, mask=mask)
    assert cache.get_seq_length() == start + 6 and (got - want)[:, 1:].norm() <= 1e-5 * want.norm()


@torch.no_grad()
def test_not_recorded(device):
    model, ids = make('paper', device), torch.randint(3, 50, (1, 20), device=device)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    assert type(cache) is RewindableCache
    before = contents(cache)
    with pytest.raises(RuntimeError, match='recorded, to a length of 8 here, got 7: call activate_past_recording'):
        cache.crop(-1)
    cache.activate_past_recording()
    read(model, ids, cache, 4)
    with pytest.raises(RuntimeError, match='recorded, to a length of 8 here, got 7'):
        cache.crop(7)
    cache.crop(-4)
    equal(contents(cache), before)
    read(model, ids, cache, 4)
    cache.reorder_cache(torch.tensor([0], device=device))
    with pytest.raises(RuntimeError, match='recorded, to a length of 12 here, got 11'):
        cache.crop(-1)


@pytest.mark.parametrize('name', list(WHOLE))
@torch.no_grad()
def test_families_that_go_back_by_pieces(name, device):
    options = {'block_type': 'rodimus_plus', 'block_residual_in_fp32': True} if name == 'rodimus' else {}
    model, ids = spread(make_model(name, device, **options)).eval(), torch.randint(3, 50, (1, 20), device=device)
    cache, expected = caches()
    read(model, ids, cache, 5, 4)
    before = contents(cache)
    with pytest.raises(NotImplementedError, match=f'led to its {WHOLE[name]}, which this layer does not record'):
        cache.crop(-2)
    equal(contents(cache), before)
    cache.crop(-4)
    read(model, ids, expected, 5)
    equal(contents(cache), contents(expected))


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


@variants
@torch.no_grad()
def test_a_copy_records_for_itself(name, device):
    model, ids = make(name, device), torch.randint(3, 50, (1, 30), device=device)
    cache, expected = caches()
    read(model, ids, cache, 9)
    copied = copy.deepcopy(cache)
    model(ids[:, 9:10], past_key_values=cache, use_cache=False)
    read(model, ids, copied, 3)
    cache.crop(-2)
    copied.crop(-5)
    read(model, ids, expected, 7)
    for x in (cache, copied):
        torch.testing.assert_close(contents(x), contents(expected))


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
    """The tokens of greedy decoding, in fewer calls where the guesses are good."""
    model = make(name, device)
    ids = torch.randint(3, 50, (1, 6), device=device).repeat(1, 4)
    options = {'use_cache': True, 'max_new_tokens': 24, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    want = model.generate(ids, **options)
    guesses, lengths = assistance(model, name, by, device), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs['input_ids'].shape[1]), with_kwargs=True,
    )
    got = model.generate(ids, **options, **guesses)
    assert torch.equal(got, want)
    # the calls read guesses, some of which are cropped
    assert max(lengths[1:]) > 1 and len(lengths) <= 24
    if by == 'itself':
        assert len(lengths) <= 5
