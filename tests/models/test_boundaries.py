"""Packed documents as transformers and TRL hand them over: the logits and gradients of the documents one by one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import DataCollatorWithFlattening

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.layers import Longhorn
from tests.integration.swapped import make_model, with_slow
from tests.models.test_cache import SWAPPED, VARIANTS, build, make, near

LENGTHS = [5, 1, 66, 3]
NAMES = {
    'position_ids': {},
    'cu_seq_lens': {'return_position_ids': False, 'return_flash_attn_kwargs': True},
    'seq_idx': {'return_position_ids': False, 'return_seq_idx': True},
    'all': {'return_flash_attn_kwargs': True, 'return_seq_idx': True},
    'from 2': {'position_ids_start': 2},
}


def packed(device, **options) -> tuple[list[torch.Tensor], dict]:
    """Documents as rows, and what transformers' collator makes of them."""
    rows = torch.randint(3, 53, (sum(LENGTHS),)).split(LENGTHS)
    batch = DataCollatorWithFlattening(return_tensors='pt', **options)([{'input_ids': x} for x in rows])
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    return [row[None].to(device) for row in rows], batch


@pytest.mark.parametrize('name', with_slow([*VARIANTS, *SWAPPED]))
@torch.no_grad()
def test_documents_one_by_one(name, device):
    """By every name that transformers' collator has for boundaries; TRL's are all of them together.

    Losses and gradients are those of the documents in `tests/integration/test_packing.py`.
    """
    model = copy.deepcopy(make(name, device))
    for options in NAMES.values():
        rows, batch = packed(device, **options)
        batch.pop('labels')
        assert 'cu_seqlens' not in batch and len(batch) > 1
        apart = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
        assert near(model(**batch, use_cache=False).logits, apart)
    bounds = F.pad(torch.tensor(LENGTHS, device=device).cumsum(0), (1, 0))
    assert near(model(batch['input_ids'], cu_seqlens=bounds, use_cache=False).logits, apart)
    assert near(model.lm_head(model.model(**batch, use_cache=False)[0]), apart)
    assert not near(model(batch['input_ids'], use_cache=False).logits, apart)


@torch.no_grad()
def test_positions_of_one_sequence_change_nothing(device):
    """As `generate` and flame pass them: plain, of padded rows, of one token, going on from a cache; nothing is packed."""
    model = build(device)
    ids = torch.randint(3, 53, (2, 9), device=device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = torch.arange(9, device=device)[None]
    expected = model(ids).logits
    for x in (positions, positions.expand(2, 9), positions + 7, positions.int(), positions[0]):
        assert torch.equal(model(ids, position_ids=x).logits, expected)
    expected = model(ids, mask).logits
    for fill in (0, 1):
        padded = (mask.cumsum(-1) - 1).masked_fill(mask == 0, fill)
        assert torch.equal(model(ids, mask, position_ids=padded).logits, expected)
    assert torch.equal(model(ids[:1], mask[:1], position_ids=padded[:1]).logits, model(ids[:1], mask[:1]).logits)
    options = {'attention_mask': mask, 'max_new_tokens': 5, 'do_sample': False, 'eos_token_id': None}
    assert torch.equal(model.generate(ids, position_ids=padded, **options), model.generate(ids, **options))
    cache = model(ids[:, :5], use_cache=True).past_key_values
    parts = [
        model(ids[:, a:b], past_key_values=cache, use_cache=True, position_ids=positions[:, a:b]).logits
        for a, b in ((5, 6), (6, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits[:, 5:], rtol=1e-4, atol=1e-4)


def test_cache_of_packed_sequences(device):
    """It holds a state a sequence, and goes on with as many rows."""
    model = build(device)
    rows, batch = packed(device)
    batch.pop('labels')
    with torch.no_grad():
        cache = model(**batch, use_cache=True).past_key_values
        last = torch.randint(3, 53, (len(rows), 1), device=device)
        logits = model(last, past_key_values=cache, use_cache=True).logits
        apart = torch.cat([model(torch.cat([a, b[None]], 1)).logits[:, -1:] for a, b in zip(rows, last, strict=True)])
    torch.testing.assert_close(logits, apart, rtol=1e-4, atol=1e-4)


RESTART = torch.tensor([[0, 1, 2, 0, 1]])
BOUNDS = torch.tensor([0, 3, 5], dtype=torch.int32)
BAD = {
    'rows of packed sequences': ({'position_ids': RESTART.expand(2, 5)}, 2, r'position_ids .* must have B = 1, got B = 2'),
    'seq_idx in rows': ({'seq_idx': torch.tensor([[0, 0, 1, 1, 1]] * 2)}, 2, r'seq_idx .* must have B = 1, got B = 2'),
    'bounds of rows': ({'cu_seq_lens_q': BOUNDS}, 2, 'cu_seq_lens_q .* must have B = 1, got B = 2'),
    'other bounds': ({'position_ids': RESTART, 'cu_seqlens': torch.tensor([0, 2, 5])}, 1,
                     r'cu_seqlens and position_ids must agree .* got \[0, 2, 5\] and \[0, 3, 5\]'),
    'one sequence or two': ({'position_ids': torch.arange(5)[None], 'cu_seq_lens_q': BOUNDS}, 1,
                            r'cu_seq_lens_q and position_ids must agree .* got \[0, 3, 5\] and \[0, 5\]'),
    'seq_idx': ({'position_ids': RESTART, 'seq_idx': torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)}, 1,
                'position_ids and seq_idx must agree'),
    'queries and keys': ({'cu_seq_lens_q': BOUNDS, 'cu_seq_lens_k': torch.tensor([0, 5])}, 1,
                         'cu_seq_lens_q and cu_seq_lens_k must agree'),
    'not to the end': ({'cu_seq_lens_k': torch.tensor([0, 3])}, 1, 'cu_seq_lens_k must end at .* T = 5, got 3'),
    'jump': ({'position_ids': torch.tensor([[0, 1, 6, 7, 8]])}, 1, 'position_ids must rise by 1 .* got 1 followed by 6'),
    'jump in a row': ({'position_ids': torch.tensor([[0, 1, 2, 3, 4], [0, 1, 6, 7, 8]])}, 2, 'got 1 followed by 6'),
    'length': ({'position_ids': torch.arange(4)[None]}, 1, r'position_ids must have shape \[B, T\] = \[1, 5\], got \[1, 4\]'),
    'rows': ({'seq_idx': torch.zeros(3, 5, dtype=torch.long)}, 2, r'seq_idx must have shape .* \[2, 5\], got \[3, 5\]'),
    'three axes': ({'position_ids': torch.zeros(3, 1, 5, dtype=torch.long)}, 1, r'position_ids must have shape'),
    'padding': ({'position_ids': RESTART, 'attention_mask': torch.tensor([[0, 1, 1, 1, 1]])}, 1,
                'attention_mask must be None or all ones with the packed sequences of position_ids'),
    # values of a wrong type
    'float positions': ({'position_ids': torch.arange(5.)[None]}, 1, 'position_ids must be a tensor of integers, got .*32'),
    'a list': ({'seq_idx': [[0] * 5]}, 1, 'seq_idx must be a tensor of integers, got list'),
    'float bounds': ({'cu_seq_lens_q': torch.tensor([0., 5.])}, 1, 'cu_seq_lens_q must be an int32 or int64 .*float32'),
}


@pytest.mark.parametrize('name', list(BAD))
def test_refused(name, device):
    options, B, message = BAD[name]
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    error = TypeError if name in ('float positions', 'a list', 'float bounds') else ValueError
    with pytest.raises(error, match=message):
        build(device)(torch.ones(B, 5, dtype=torch.long, device=device), **options)
    with pytest.raises(error, match=message):
        Longhorn(hidden_size=24).to(device)(torch.randn(B, 5, 24, device=device), **options)


@torch.no_grad()
def test_packed_sequences_start_afresh(device):
    model = build(device)
    cache = model(torch.ones(1, 4, dtype=torch.long, device=device), use_cache=True).past_key_values
    with pytest.raises(ValueError, match='position_ids must be of one sequence where past_key_values is filled'):
        model(torch.ones(1, 5, dtype=torch.long, device=device), past_key_values=cache, position_ids=RESTART.to(device))


@pytest.mark.parametrize('name', ['cu_seqlen', 'attn_mask', 'is_causal', 'num_item_in_batch'])
def test_unknown_keyword(name, device):
    model, layer = build(device), Longhorn(hidden_size=24).to(device)
    ids = torch.ones(1, 5, dtype=torch.long, device=device)
    h = torch.randn(1, 5, 24, device=device)
    for call, x in ((model, ids), (model.model, ids), (layer, h), (layer, h[:, :1])):
        with pytest.raises(TypeError, match=f"forward got an unexpected keyword argument '{name}'; those it takes are cu_"):
            call(x, **{name: torch.tensor([0, 5])})


@pytest.mark.parametrize('family', with_slow(list(FAMILIES)))
def test_refused_by_families(family, device):
    model, ids = make_model(family, device).eval(), torch.ones(2, 9, dtype=torch.long, device=device)
    for name, x, kind, message in (
        ('cu_seqlen', torch.tensor([0, 9]), TypeError, "Model.forward got an unexpected keyword argument 'cu_seqlen'"),
        ('attention_mask', torch.ones(2, 8), ValueError, r'attention_mask must have shape .*\[2, 8\]'),
        ('position_ids', torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), ValueError, 'position_ids .* B = 1, got B = 2'),
    ):
        with pytest.raises(kind, match=message):
            model(ids, **{name: x.to(device)})


@pytest.mark.parametrize('family', ['longhorn', 'gla'])
def test_no_tokens(family, device):
    model = build(device) if family == 'longhorn' else make_model(family, device)
    ids = torch.ones(2, 5, dtype=torch.long, device=device)
    embeds = model.get_input_embeddings()(ids)
    for call in ({'input_ids': ids[:, :0]}, {'input_ids': ids[:0]}, {'input_ids': ids[0]}, {'inputs_embeds': embeds[:, :0]}):
        for module in (model, model.model):
            with pytest.raises(ValueError, match=r'input_ids must have the shape \[B, T\], .* one row and one token, got'):
                module(**call)


def test_empty_sequences_in_one_of_two_names(device):
    model, ids = build(device), torch.randint(3, 53, (1, 9), device=device)
    a, b = (torch.tensor(x, device=device) for x in ([0, 4, 4, 9], [0, 4, 9]))
    assert model(ids, cu_seqlens=a, cu_seq_lens_q=b, cu_seq_lens_k=b).logits.shape == (1, 9, 53)
