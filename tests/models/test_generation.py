"""Generation with what else transformers offers: padded prompts in pieces, chunks of a prompt, several turns."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import DynamicCache, PreTrainedTokenizerFast

from fla_longhorn.attn_mode import FAMILIES
from tests.integration.test_attn_mode import make_model, spread
from tests.models.test_cache import VARIANTS, build

HYBRID = {'layers': [1], 'num_heads': 2, 'window_size': 6}
GREEDY = {'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
models = pytest.mark.parametrize('name', [*VARIANTS, 'gla', 'hgrn', 'linear_attn', 'rwkv7'])
# the columns of padding by row
LEFT = {0: slice(0, 4), 2: slice(0, 9)}
ALL_ROWS = {0: slice(0, 5), 1: slice(0, 6), 2: slice(0, 5)}
BETWEEN = {0: slice(0, 2), 1: slice(5, 7), 2: slice(6, 7)}


def make(name: str, device):
    if name in VARIANTS:
        return build(device, **VARIANTS[name])
    return spread(make_model(name, device, attn=HYBRID)).eval()


def prompts(device, T: int = 12, padding: dict[int, slice] = LEFT) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of them padded on the left."""
    ids = torch.randint(3, 50, (3, T), device=device)
    mask = torch.ones_like(ids)
    for row, columns in padding.items():
        mask[row, columns] = 0
    return ids, mask


@models
@torch.no_grad()
def test_padded_prompts_in_pieces(name, device):
    """Each row gets what it gets without padding, from one call; pieces and tokens of a row may be padding alone."""
    model, cases = make(name, device), [(LEFT, x) for x in ([7, 23], [3, 10, 1, 2, 14], [28, 2], [12, 1, 17])]
    if name in ('paper', 'exact, mlp', 'hybrid'):
        cases += [(ALL_ROWS, [4, 4, 22]), (BETWEEN, [5, 1, 1, 1, 22])]
    for padding, pieces in cases:
        ids, mask = prompts(device, 30, padding)
        cache, outputs, at = None, [], 0
        for n in pieces:
            output = model(ids[:, at:at + n], mask[:, :at + n], past_key_values=cache, use_cache=True)
            cache, at = output.past_key_values, at + n
            outputs.append(output.logits)
        got = torch.cat(outputs, 1)
        assert cache.get_seq_length() == 30
        for row, kept in enumerate(mask.bool()):
            want = model(ids[row:row + 1, kept], use_cache=False).logits[0]
            assert (got[row, kept] - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize('name', ['paper', 'hybrid', 'window', 'gla'])
@pytest.mark.parametrize('use_cache', [False, True])
@torch.no_grad()
def test_padding_anywhere(name, use_cache, device):
    """Each row gets what it gets without padding, and the next tokens too."""
    model, (ids, _) = make(name, device), prompts(device)
    mask = torch.ones_like(ids)
    mask[1, 2:5], mask[2, 9:], mask[0, :3] = 0, 0, 0
    windows = name in ('window', 'gla')
    if use_cache and windows:
        with pytest.raises(ValueError, match='attention_mask must not have padding behind tokens .* window_size = 6'):
            model(ids, mask, use_cache=True)
        # fla remembers what a tensor held
        mask = mask.clone()
        mask[2] = 1
    output = model(ids, mask, use_cache=use_cache)
    more = torch.randint(3, 50, (3, 3), device=device)
    both, whole = torch.cat([ids, more], 1), torch.cat([mask, mask.new_ones(3, 3)], 1)
    later = []
    for n in (1, 3) if use_cache else ():
        cache = output.past_key_values.snapshot()
        later.append(model(both[:, 12:12 + n], whole[:, :12 + n], past_key_values=cache, use_cache=True))
    for row in range(3):
        want = model(both[row:row + 1, whole[row] != 0], use_cache=False).logits[0]
        n = int(mask[row].sum())
        assert (output.logits[row, mask[row] != 0] - want[:n]).norm() <= 1e-5 * want.norm()
        for x in later:
            assert (x.logits[row] - want[n:][:x.logits.shape[1]]).norm() <= 1e-5 * want.norm()


@models
def test_a_prompt_in_chunks(name, device):
    model = make(name, device)
    for padding in ({}, LEFT, *([ALL_ROWS] if name in VARIANTS else [])):
        ids, mask = prompts(device, padding=padding)
        given = {'attention_mask': mask, 'max_new_tokens': 6, **GREEDY} if padding else {'max_new_tokens': 6, **GREEDY}
        assert torch.equal(model.generate(ids, prefill_chunk_size=4, **given), model.generate(ids, **given))


@models
def test_embedded_prompts(name, device):
    model, (ids, mask) = make(name, device), prompts(device)
    options = {'max_new_tokens': 6, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    for more in ({}, {'num_beams': 2}):
        want = model.generate(ids, attention_mask=mask, **more, **options)[:, 12:]
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model.generate(inputs_embeds=embeds, attention_mask=mask, **more, **options), want)


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


@pytest.mark.parametrize('name', ['paper', 'gla'])
def test_stop_strings(name, device):
    """`generate` hands their tokenizer on to the model, as `transformers serve` does."""
    model, (ids, _) = make(name, device), prompts(device)
    options = {'max_new_tokens': 6, **GREEDY}
    want = model.generate(ids[:1], **options)
    letters = Tokenizer(BPE({character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer, letters.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    letters = PreTrainedTokenizerFast(tokenizer_object=letters)
    got = model.generate(ids[:1], **options, stop_strings=[letters.decode(want[0, -4:-2])], tokenizer=letters)
    assert got.shape[1] < want.shape[1] and torch.equal(got, want[:, :got.shape[1]])


@pytest.mark.parametrize('name', ['paper', 'hybrid', 'gla'])
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


@pytest.mark.parametrize('name', ['paper', *FAMILIES])
def test_continuous_batching(name, device):
    model = build(device) if name == 'paper' else make_model(name, device)
    with pytest.raises(NotImplementedError, match='generate_batch, .* call generate with a batch that is padded on the left'):
        model.generate_batch([[5, 6, 7], [8, 9]])
