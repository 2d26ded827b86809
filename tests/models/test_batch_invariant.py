"""The same bits of a token in generation and in training (`make_batch_invariant`)."""

import pytest
import torch

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.models.batch_invariant import make_batch_invariant

FORMS = {
    'paper': {},
    'exact': {'exact': True},
    'heads': {'exact': True, 'num_heads': 2, 'k_norm': 'l2', 'scalar_beta': True},
    'mlp, values': {'hidden_ratio': 4, 'value_proj': True},
    'gate': {'gate': 'channel', 'exact': True},
    'turns': {'allow_neg_eigval': True, 'tie_qk': True},
}
DTYPES = [torch.float32, torch.bfloat16]


def make(form, dtype):
    torch.manual_seed(0)
    config = LonghornConfig(hidden_size=64, num_hidden_layers=3, vocab_size=97, eos_token_id=None, **FORMS[form])
    model = make_batch_invariant(LonghornForCausalLM(config).eval().to(dtype))
    with torch.no_grad():
        for x in model.parameters():
            x += 0.1 * torch.randn_like(x)
    return model


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('prompt', [1, 33, 70])
def test_token_by_token(form, dtype, prompt):
    model, ids = make(form, dtype), torch.randint(3, 97, (3, 100))
    with torch.inference_mode():
        output = model(ids[:, :prompt], use_cache=True)
        logits = [output.logits]
        for token in ids[:, prompt:].split(1, 1):
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
        alone = model(ids[1:2]).logits
    trained = model.train()(ids, use_cache=False).logits
    assert trained.requires_grad
    assert torch.equal(torch.cat(logits, 1), trained)
    assert torch.equal(alone, trained[1:2])


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('form', FORMS)
def test_ratios_of_generation_and_training_are_one(form, dtype):
    """As GRPO computes them: completions sampled after prompts padded on the left, then one forward of both."""
    model, prompts = make(form, dtype), torch.randint(3, 97, (4, 9))
    mask = torch.ones_like(prompts)
    mask[0, :4] = mask[2, :8] = 0
    torch.manual_seed(1)
    sampled = model.generate(
        prompts, attention_mask=mask, do_sample=True, max_new_tokens=40, output_logits=True, return_dict_in_generate=True,
    )
    completions = sampled.sequences[:, 9:]
    assert completions.shape == (4, 40) and len(completions.unique()) > 20
    mask = torch.cat([mask, torch.ones_like(completions)], 1)
    logits = model.train()(sampled.sequences, attention_mask=mask, use_cache=False).logits[:, 8:-1]
    old, new = (
        x.float().log_softmax(-1).gather(-1, completions[..., None]) for x in (torch.stack(sampled.logits, 1), logits)
    )
    assert (new - old).count_nonzero() == 0


def test_adapters_and_weights_stay(tmp_path):
    model = make('exact', torch.float32)
    model.save_pretrained(tmp_path)
    again = LonghornForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    ids = torch.randint(3, 97, (1, 5))
    assert torch.allclose(model(ids).logits, again.eval()(ids).logits, atol=1e-5)


def test_attention_is_refused():
    config = LonghornConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97, attn={'layers': [0], 'num_heads': 2})
    with pytest.raises(ValueError, match='must have no attention layers, got one in model.layers.0.attn'):
        make_batch_invariant(LonghornForCausalLM(config))


def test_another_device_is_refused(device):
    model = LonghornForCausalLM(LonghornConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97))
    away = 'meta' if torch.device(device).type == 'cpu' else device
    with pytest.raises(ValueError, match=f'must be on the CPU, got model.embeddings.weight on {away}'):
        make_batch_invariant(model.to(away))
