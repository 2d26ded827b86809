"""Generation with what else transformers offers: padded prompts in pieces, chunks of a prompt, several turns."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import DynamicCache, PreTrainedTokenizerFast

from fla_longhorn.attn_mode import FAMILIES
from tests.integration.test_attn_mode import make_model, spread
from tests.models.test_cache import VARIANTS, build

HYBRID = {'layers': [1], 'num_heads': 2, 'window_size': 6}
models = pytest.mark.parametrize('name', [*VARIANTS, 'gla', 'hgrn', 'linear_attn', 'rwkv7'])
LEFT = {0: 4, 2: 9}


def make(name: str, device):
    if name in VARIANTS:
        return build(device, **VARIANTS[name])
    return spread(make_model(name, device, attn=HYBRID)).eval()


def prompts(device, T: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows, two of them padded on the left."""
    ids = torch.randint(3, 50, (3, T), device=device)
    mask = torch.ones_like(ids)
    for row, n in LEFT.items():
        mask[row, :n] = 0
    return ids, mask


@models
@torch.no_grad()
def test_padded_prompts_in_pieces(name, device):
    """Each row gets what it gets without padding, from one call."""
    model, (ids, mask) = make(name, device), prompts(device, 30)
    for lengths in ([7, 23], [3, 10, 1, 2, 14], [28, 2], [12, 1, 17]):
        cache, outputs, at = None, [], 0
        for n in lengths:
            output = model(ids[:, at:at + n], mask[:, :at + n], past_key_values=cache, use_cache=True)
            cache, at = output.past_key_values, at + n
            outputs.append(output.logits)
        got = torch.cat(outputs, 1)
        for row in range(3):
            want = model(ids[row:row + 1, LEFT.get(row, 0):], use_cache=False).logits[0]
            assert (got[row, LEFT.get(row, 0):] - want).norm() <= 1e-5 * want.norm()


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
    model, (ids, mask) = make(name, device), prompts(device)
    options = {'max_new_tokens': 6, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    for given in ({}, {'attention_mask': mask}):
        want = model.generate(ids, **given, **options)
        assert torch.equal(model.generate(ids, prefill_chunk_size=5, **given, **options), want)


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
    options = {'max_new_tokens': 5, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    more = torch.randint(3, 50, (3, 6), device=device)
    for first in (torch.ones_like(mask), mask):
        output = model.generate(ids, attention_mask=first, return_dict_in_generate=True, **options)
        both = torch.cat([output.sequences, more], 1)
        whole = torch.cat([first, first.new_ones(3, 11)], 1)
        want = model.generate(both, attention_mask=whole, **options)
        assert torch.equal(
            model.generate(both, attention_mask=whole, past_key_values=output.past_key_values, **options), want,
        )


@torch.no_grad()
def test_full_mask_beside_a_cache(device):
    """Several tokens behind a cache with a mask of ones, which fla's attention refuses, as without a mask."""
    model, (ids, _) = make('hybrid', device), prompts(device)
    outputs = []
    for mask in (None, torch.ones_like(ids)):
        cache = model(ids[:, :3], use_cache=True).past_key_values
        outputs.append(model(ids[:, 3:], attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    assert ids.shape[1] > 4 and torch.equal(*outputs)


@pytest.mark.parametrize('name', ['paper', 'gla'])
def test_stop_strings(name, device):
    """`generate` hands their tokenizer on to the model, as `transformers serve` does."""
    model, (ids, _) = make(name, device), prompts(device)
    options = {'max_new_tokens': 6, 'do_sample': False, 'eos_token_id': None, 'pad_token_id': 0}
    want = model.generate(ids[:1], **options)
    letters = Tokenizer(BPE({character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer, letters.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    letters = PreTrainedTokenizerFast(tokenizer_object=letters)
    got = model.generate(ids[:1], **options, stop_strings=[letters.decode(want[0, -4:-2])], tokenizer=letters)
    assert got.shape[1] < want.shape[1] and torch.equal(got, want[:, :got.shape[1]])


@pytest.mark.parametrize('name', ['paper', 'hybrid', 'gla'])
def test_caches_of_attention(name, device):
    model, (ids, _) = make(name, device), prompts(device)
    want = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    named = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, cache_implementation='dynamic')
    assert torch.equal(named, want)
    for call in (model, model.generate):
        with pytest.raises(TypeError, match=r'past_key_values must be None .*RewindableCache\(\), got DynamicCache'):
            call(ids, past_key_values=DynamicCache(), use_cache=True)


@pytest.mark.parametrize('name', ['paper', *FAMILIES])
def test_continuous_batching(name, device):
    model = build(device) if name == 'paper' else make_model(name, device)
    with pytest.raises(NotImplementedError, match='generate_batch, .* call generate with a batch that is padded on the left'):
        model.generate_batch([[5, 6, 7], [8, 9]])


@pytest.mark.parametrize('name', ['paper', 'gla'])
def test_peft_by_all_linear_layers(name, device):
    """PEFT has no default for these models, and says so; this is what to give it."""
    model = build(device) if name == 'paper' else make_model(name, device)
    with pytest.raises(ValueError, match='target_modules'):
        get_peft_model(model, LoraConfig(task_type='CAUSAL_LM'))
    adapted = get_peft_model(model, LoraConfig(task_type='CAUSAL_LM', target_modules='all-linear'))
    names = {name for name, x in adapted.named_parameters() if x.requires_grad}
    for projection in ('in_proj', 'x_proj', 'beta_proj', 'out_proj'):
        assert any(projection in x for x in names)
    assert not any('lm_head' in x for x in names)


@torch.no_grad()
def test_no_cache_where_none_is_wanted(device):
    """Every token from the whole text: the same tokens, and nothing is kept."""
    model, (ids, mask) = build(device), prompts(device)
    kept, plain = (
        model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, use_cache=x)
        for x in (True, False)
    )
    assert plain.past_key_values is None and kept.past_key_values is not None
    assert torch.equal(plain.sequences, kept.sequences)
