"""Generation with what else transformers offers: padded prompts in pieces, chunks of a prompt, several turns."""

from itertools import product

import pytest
import torch
from transformers import DynamicCache

from tests.devices import slow_but
from tests.models.test_cache import VARIANTS, make

GREEDY = {'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
models = pytest.mark.parametrize('name', [*VARIANTS, 'gla hybrid', 'hgrn hybrid', 'linear_attn hybrid', 'rwkv7 hybrid'])
TOLD = ('hybrid', 'exact, gate', 'paper', 'window', 'gla', 'linear_attn hybrid', 'rwkv7 hybrid')
HOW = ('greedy', 'samples', 'beams', 'selected', 'embedded')
# the columns of padding by row
LEFT = {0: slice(0, 4), 2: slice(0, 9)}


def prompts(device, T: int = 12, padding: dict[int, slice] = LEFT) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of them padded on the left."""
    ids = torch.randint(3, 50, (3, T), device=device)
    mask = torch.ones_like(ids)
    for row, columns in padding.items():
        mask[row, columns] = 0
    return ids, mask


@models
def test_cached_and_embedded_prompts(name, device):
    """Give the tokens that are found without a cache, also by beam search, which reorders the cache's rows."""
    model, (ids, mask) = make(name, device), prompts(device)
    for more in ({}, {'num_beams': 4}):
        options = {'attention_mask': mask, 'max_new_tokens': 6, **more, **GREEDY}
        want = model.generate(ids, use_cache=False, **options)
        assert len(set(want[:, 12:].flatten().tolist())) > 5
        assert torch.equal(model.generate(ids, **options), want)
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), want[:, 12:])


@models
def test_turns(name, device):
    """A second prompt behind the first one's answer, from the cache as from the start, with a mask of ones too."""
    model, (ids, mask) = make(name, device), prompts(device)
    options = {'max_new_tokens': 5, **GREEDY}
    more = torch.randint(3, 50, (3, 6), device=device)
    for first in (torch.ones_like(mask), mask):
        output = model.generate(ids, attention_mask=first, return_dict_in_generate=True, **options)
        both = torch.cat([output.sequences, more], 1)
        whole = torch.cat([first, first.new_ones(3, 11)], 1)
        want = model.generate(both, attention_mask=whole, **options)
        assert torch.equal(
            model.generate(both, attention_mask=whole, past_key_values=output.past_key_values, **options), want,
        )


@pytest.mark.parametrize(('name', 'how'), slow_but([*TOLD[:2], *product(TOLD, HOW[:1])], product(TOLD, HOW)))
def test_a_conversation_in_a_batch(name, how, device):
    """A row that ended early reads none of the padding that `generate` appends to it."""
    model, (ids, mask) = make(name, device), prompts(device)
    stops = model.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY)[:1, 13]
    options = {'attention_mask': mask, 'max_new_tokens': 8, 'pad_token_id': 0, 'return_dict_in_generate': True}
    inputs = {'inputs_embeds': model.get_input_embeddings()(ids)} if how == 'embedded' else {'input_ids': ids}
    if how == 'samples':
        stops = torch.arange(3, 14, device=device)
        options |= {'do_sample': True, 'num_return_sequences': 2, 'temperature': 2.0}
        ids, mask = (x.repeat_interleave(2, 0) for x in (ids, mask))
    answers = model.generate(**inputs, **options, eos_token_id=stops.tolist())
    new = answers.sequences if how == 'embedded' else answers.sequences[:, 12:]
    padding = torch.isin(new[:, :-1], stops).cumsum(1) > 0
    assert padding.any()
    ids = torch.cat([ids, new, torch.randint(3, 50, (len(ids), 3), device=device)], 1)
    mask = torch.cat([mask, mask.new_ones(len(ids), 1), ~padding, mask.new_ones(len(ids), 3)], 1)
    cache, options = answers.past_key_values, {'max_new_tokens': 4, **GREEDY}
    if how == 'beams':
        cache.batch_repeat_interleave(2)
        options['num_beams'] = 2
    elif how == 'selected':
        cache.batch_select_indices(torch.tensor([0], device=device))
        ids, mask = ids[:1], mask[:1]
    got = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, ids.shape[1]:]
    for row, kept, answer in zip(ids, mask.bool(), got, strict=True):
        alone = row[kept][None]
        assert torch.equal(model.generate(alone, attention_mask=torch.ones_like(alone), **options)[0, alone.shape[1]:], answer)


@pytest.mark.parametrize('name', ['paper', 'window', 'gla', 'rwkv7 hybrid'])
@torch.no_grad()
def test_a_mask_that_disagrees(name, device):
    """With what a row has read: it comes a turn later, or has forgotten padding."""
    model, (ids, mask) = make(name, device), prompts(device)
    ones = torch.ones_like(mask)
    # for a single token a GPU is not waited for
    for T in (1, 3) if device.type == 'cpu' else (3,):
        cache = model(ids[:, :9], use_cache=True).past_key_values
        with pytest.raises(ValueError, match='got 0 in row 0 for column 0, which was read'):
            model(ids[:, 9:9 + T], mask[:, :9 + T], past_key_values=cache, use_cache=True)
        cache = model(ids[:, :9], mask[:, :9], use_cache=True).past_key_values
        model(ids[:, 9:10], mask[:, :10], past_key_values=cache, use_cache=True)
        cache.batch_select_indices(torch.tensor([1, 2], device=device))
        with pytest.raises(ValueError, match='got 1 in row 1 for column 0, which was padding'):
            model(ids[1:, 10:10 + T], ones[1:, :10 + T], past_key_values=cache, use_cache=False)
        model(ids[1:, 10:10 + T], mask[1:, :10 + T], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize('name', ['paper', 'hybrid', 'gla hybrid'])
def test_caches_of_attention(name, device):
    model, (ids, _) = make(name, device), prompts(device)
    options = {'max_new_tokens': 3, 'return_dict_in_generate': True, **GREEDY}
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation='dynamic', **options).sequences, want.sequences)
    none = model.generate(ids, use_cache=False, **options)
    assert none.past_key_values is None and torch.equal(none.sequences, want.sequences)
    for call in (model, model.generate):
        with pytest.raises(TypeError, match=r'past_key_values must be None .*RewindableCache\(\), got DynamicCache'):
            call(ids, past_key_values=DynamicCache(), use_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['exact, gate', 'paper'])
@torch.no_grad()
def test_a_long_prompt(name, device):
    """The logits of 200 tokens after 65,536 are those of one pass (docs/evaluate.md)."""
    model = make(name, device)
    ids = model.generate(torch.randint(3, 50, (1, 65536), device=device), max_new_tokens=200, **GREEDY)
    out = model(ids[:, :65536], use_cache=True, logits_to_keep=1)
    logits = [out.logits]
    for token in ids[:, 65536:-1].split(1, 1):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    want = model(ids, logits_to_keep=201).logits[:, :-1]
    assert (torch.cat(logits, 1) - want).norm() <= 1e-5 * want.norm()
    assert torch.equal(want.argmax(-1), ids[:, 65536:])
