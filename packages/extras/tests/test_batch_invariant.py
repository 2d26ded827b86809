"""The same bits of a token in generation and in training (`make_batch_invariant`)."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn.modules import L2Norm, RMSNorm
from fla_longhorn_extras.batch_invariant import make_batch_invariant
from tests.models.test_cache import build
from tests.models.test_capture import RECIPE

FORMS = {
    'paper': {},
    'exact': {'exact': True},
    'heads': {'exact': True, 'num_heads': 2, 'k_norm': 'l2', 'scalar_beta': True},
    'mlp, values': {'hidden_ratio': 4, 'value_proj': True},
    'gate': {'gate': 'channel', 'exact': True},
    'turns': {'allow_neg_eigval': True, 'tie_qk': True},
}
DTYPES = [torch.float32, torch.bfloat16]


def make(form, dtype, device):
    torch.manual_seed(0)
    # kernels that are interpreted take long
    num_layers = 3 if device.type == 'cpu' else 1
    config = LonghornConfig(hidden_size=64, num_hidden_layers=num_layers, vocab_size=97, eos_token_id=None, **FORMS[form])
    model = make_batch_invariant(LonghornForCausalLM(config).eval().to(device, dtype))
    with torch.no_grad():
        for x in model.parameters():
            x += 0.1 * torch.randn_like(x)
    return model


@torch.no_grad()
def assert_invariant(model, ids):
    output = model(ids[:, :-4], use_cache=True)
    logits = [output.logits]
    for token in ids[:, -4:].split(1, 1):
        logits.append(model(token, past_key_values=output.past_key_values, use_cache=True).logits)
    assert torch.equal(torch.cat(logits, 1), model(ids).logits)


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('prompt', [1, 33, 70])
def test_token_by_token(form, dtype, prompt, device):
    new = 30 if device.type == 'cpu' else 4
    model, ids = make(form, dtype, device), torch.randint(3, 97, (3, prompt + new), device=device)
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
def test_ratios_of_generation_and_training_are_one(form, dtype, device):
    """As GRPO computes them: completions sampled after prompts padded on the left, then one forward of both."""
    model, prompts = make(form, dtype, device), torch.randint(3, 97, (4, 9), device=device)
    new = 40 if device.type == 'cpu' else 6
    mask = torch.ones_like(prompts)
    mask[0, :4] = mask[2, :8] = 0
    torch.manual_seed(1)
    sampled = model.generate(
        prompts, attention_mask=mask, do_sample=True, max_new_tokens=new, output_logits=True, return_dict_in_generate=True,
    )
    completions = sampled.sequences[:, 9:]
    assert completions.shape == (4, new) and len(completions.unique()) > new // 2
    mask = torch.cat([mask, torch.ones_like(completions)], 1)
    logits = model.train()(sampled.sequences, attention_mask=mask, use_cache=False).logits[:, 8:-1]
    old, new = (
        x.float().log_softmax(-1).gather(-1, completions[..., None]) for x in (torch.stack(sampled.logits, 1), logits)
    )
    assert (new - old).count_nonzero() == 0


@pytest.mark.parametrize(('cls', 'options'), [
    (torch.nn.Linear, {'hidden_ratio': 2, 'gate': 'channel', 'value_proj': True}), (RMSNorm, {}),
    (torch.nn.RMSNorm, {'fuse_norm': False}), (L2Norm, {'k_norm': 'l2', 'num_heads': 2}),
], ids=['linear', 'norm', 'norm of PyTorch', 'norm of keys'])
def test_rows_of_each_call(cls, options, monkeypatch, device):
    """Compiled kernels and libraries choose their order of sums by the number of rows."""
    rows, forward = [], cls.forward
    monkeypatch.setattr(cls, 'forward', lambda self, x: rows.append(x[..., 0].numel()) or forward(self, x))
    config = LonghornConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97, **options)
    model = make_batch_invariant(LonghornForCausalLM(config).to(device))
    assert_invariant(model, torch.randint(3, 97, (2, 40), device=device))
    assert len(rows) > 4 and len(set(rows)) == 1


class OwnLinear(torch.nn.Linear):
    """Whose forward may be another."""


def own_linear(model):
    model.lm_head.__class__ = OwnLinear


@pytest.mark.parametrize(('options', 'change', 'message'), [
    ({'attn': {'layers': [0], 'num_heads': 2}}, None, 'must have no attention layers, got one in model.layers.0.attn'),
    ({'hidden_size': 20}, None, 'must be a multiple of 16, got 40 in model.layers.0.attn'),
    ({}, torch.nn.Module.half, 'must be in float32 or bfloat16, got torch.float16'),
    ({}, own_linear, 'of a known class, got OwnLinear in lm_head'),
    ({}, 'torch', 'needs the compiled loops of fla-longhorn-cpu on a CPU, got PyTorch'),
])
def test_what_cannot_keep_the_promise(options, change, message, monkeypatch):
    model = LonghornForCausalLM(LonghornConfig(**{'hidden_size': 64, 'num_hidden_layers': 1, 'vocab_size': 97, **options}))
    if change == 'torch':
        monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'torch')
    elif change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        make_batch_invariant(model)


def test_swapped_models(device):
    """fla's norms have the same bits on a CPU; on a GPU their launches depend on the number of rows."""
    config = AutoConfig.for_model('gla', hidden_size=64, num_hidden_layers=1, num_heads=1, vocab_size=97, attn_mode='longhorn')
    model = AutoModelForCausalLM.from_config(config).to(device)
    if device.type == 'cpu':
        assert_invariant(make_batch_invariant(model), torch.randint(3, 97, (2, 9), device=device))
        return
    with pytest.raises(ValueError, match="Longhorn's own modules on cuda.*, got RMSNorm in model.layers.0.attn_norm"):
        make_batch_invariant(model)


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@torch.no_grad()
def test_replayed_steps_of_a_batch_invariant_model(exact, device):
    if device.type == 'cpu':
        pytest.skip('a CUDA graph is for a GPU: make test-device')
    names = {'torch': torch}
    exec(RECIPE, names)
    model, ids = make_batch_invariant(build(device, exact=exact).eval()), torch.randint(3, 53, (2, 9), device=device)
    cache = model(ids[:, :5], use_cache=True).past_key_values
    step = names['make_step'](model, cache, None)
    assert torch.equal(torch.cat([step(ids[:, t:t + 1]).clone() for t in range(5, 9)], 1), model(ids).logits[:, 5:])
