import json

import pytest
import torch
from fla.layers.attn import Attention
from transformers import AutoModelForCausalLM

from fla_longhorn.attn_mode.config import FROM_FAMILY, OPTIONS, mixer_options
from fla_longhorn.layers import Longhorn
from tests.integration.swapped import families, gradients, make_model, mixers, spread, tokens


@families
@pytest.mark.parametrize('attn', [None, dict(layers=[1], num_heads=2, num_kv_heads=1, window_size=8)], ids=['', 'hybrid'])
def test_training(family, attn, device):
    """A step lowers the loss, and activation checkpointing changes no gradient; attention layers are fla's."""
    model, ids = make_model(family, device, attn=attn).train(), tokens(device, 2, 80)
    layers = [x for x in model.modules() if isinstance(x, (Attention, Longhorn))]
    assert [(isinstance(x, Attention), x.layer_idx) for x in layers] == [(False, 0), (attn is not None, 1)]
    assert attn is None or (layers[1].num_kv_heads, layers[1].window_size) == (1, 8)
    want = gradients(model, ids)
    assert all(x.isfinite().all() for x in want.values())
    assert all(p.grad.any() for layer in layers for p in layer.parameters())
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(model, ids), want, rtol=1e-5, atol=1e-8)
    with torch.no_grad():
        before = model(ids, labels=ids).loss
        for p in model.parameters():
            p -= 0.1 * p.grad
        assert model(ids, labels=ids).loss < before


@families
def test_saved_and_loaded(family, tmp_path, device):
    model = make_model(family, device, longhorn_state_size=8).eval()
    native = Longhorn(hidden_size=64, **mixer_options(model.config))
    assert [(k, v.shape) for k, v in mixers(model)[0].state_dict().items()] == [
        (k, v.shape) for k, v in native.state_dict().items()
    ]
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / 'config.json').read_text())
    assert saved['attn_mode'] == 'longhorn' and saved['longhorn_state_size'] == 8
    own = {f'longhorn_{name}' for name in {*OPTIONS} - {*FROM_FAMILY}}
    assert {name for name in saved if name.startswith('longhorn')} == own
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(device).eval()
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    ids = tokens(device, 1, 20)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@families
@pytest.mark.parametrize('attn', [
    None, dict(layers=[1], num_heads=2, num_kv_heads=1), dict(layers=[0], num_heads=4, window_size=6),
], ids=['', 'hybrid', 'window'])
def test_generation(family, attn, device):
    """A cache changes nothing, and neither does padding on the left."""
    model, ids = spread(make_model(family, device, attn=attn)).eval(), tokens(device, 2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True,
                   return_dict_in_generate=True)
    cached, plain = (model.generate(ids, attention_mask=mask, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    got, want = torch.stack(cached.logits), torch.stack(plain.logits)
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert torch.equal(cached.sequences[:1, 5:], model.generate(ids[:1, 5:], **options).sequences)


def test_initialisation(device):
    """As in Longhorn's own models for `D` and the step sizes, by the family's rule for the rest."""
    for family in ('gla', 'gated_deltanet', 'rwkv6', 'rwkv7'):
        mixer = mixers(make_model(family, device))[0]
        bound = mixer.beta_rank ** -0.5
        assert torch.equal(mixer.D, torch.ones_like(mixer.D)) and mixer.D._no_weight_decay
        assert not mixer.beta_proj.bias.any()
        assert 0.9 * bound < mixer.beta_proj.weight.abs().max() <= bound
        assert 0.018 < mixer.in_proj.weight.std() < 0.022
    # RWKV rescales its residual branches: uniform in +-1/sqrt(fan_in), over the square root of their number
    bound = (mixers(make_model('rwkv6', device))[0].out_proj.in_features * 4) ** -0.5
    assert 0.9 * bound < mixers(make_model('rwkv6', device))[0].out_proj.weight.abs().max() <= bound
