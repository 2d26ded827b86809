"""The models: training, saving, generating, initialisation."""

import math

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from fla_longhorn import LonghornConfig, LonghornForCausalLM, LonghornModel
from fla_longhorn.layers import Longhorn
from tests.integration.swapped import make_model


def small(**options) -> LonghornConfig:
    return LonghornConfig(**{
        'hidden_size': 32, 'num_hidden_layers': 3, 'vocab_size': 53, 'state_size': 4, 'pad_token_id': 0, **options,
    })


LINEAR = {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True}
VARIANTS = {
    'paper': {},
    'exact': {'exact': True, 'num_heads': 2, 'k_norm': 'l2', 'hidden_ratio': 2},
    'plain modules': {'fuse_norm': False, 'fuse_swiglu': False, 'fuse_cross_entropy': False, 'hidden_ratio': 4},
    'powlu': {'hidden_ratio': 2, 'hidden_act': 'powlu', 'tie_qk': True, 'value_proj': True, 'num_heads': 2},
    'plain powlu': {'intermediate_size': 40, 'hidden_act': 'powlu', 'fuse_swiglu': False, 'conv_bias': False},
    'linear loss': LINEAR,
    'linear loss, l2warp': {**LINEAR, 'use_l2warp': True, 'tie_word_embeddings': False},
    'untied': {'tie_word_embeddings': False, 'scalar_beta': True, 'num_heads': 2, 'use_bias': True},
    'l2warp': {'use_l2warp': True, 'attn_mode': 'fused_recurrent'},
}


@pytest.mark.parametrize('options', [
    {}, {'tie_word_embeddings': False}, {'beta_rank': 3, 'expand': 1.5, 'k_norm': 'l2', 'num_heads': 2, 'scalar_beta': True},
    {'exact': True, 'allow_neg_eigval': True, 'gate': 'channel'},
], ids=str)
def test_save_and_load_is_exact(options, tmp_path, device):
    model = LonghornForCausalLM(small(**options)).to(device).eval()
    ids = torch.randint(53, (2, 17), device=device)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert type(again) is LonghornForCausalLM
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert all(layer.attn.D._no_weight_decay for layer in again.model.layers)
    assert (again.lm_head.weight is again.model.embeddings.weight) == options.get('tie_word_embeddings', True)
    assert torch.equal(again(ids).logits, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    base = AutoModel.from_pretrained(tmp_path).to(device)
    assert type(base) is LonghornModel
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(device)
    assert (half(ids).logits - expected).norm() < 0.05 * expected.norm()


def assert_uniform(weight: torch.Tensor, bound: float):
    """In +-bound, where the largest of many values is near it."""
    assert bound * 0.97 < weight.abs().max().item() <= bound * 1.0001
    assert weight.std().item() == pytest.approx(bound / 3 ** 0.5, rel=0.1)


def from_meta(device) -> LonghornForCausalLM:
    with torch.device('meta'):
        model = LonghornForCausalLM(small(hidden_size=64))
    model.to_empty(device=device)
    with torch.no_grad():
        for x in model.parameters():
            x.fill_(float('nan'))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    return model


class TestInitialisation:
    """The authors' `_init_weights`: PyTorch's defaults, zero biases, embeddings 0.02, out_proj over sqrt(layers)."""

    @pytest.mark.parametrize('make', [lambda device: LonghornForCausalLM(small(hidden_size=64)), from_meta],
                             ids=['fresh', 'meta'])
    def test_weights(self, make, default_device):
        model = make(default_device)
        layers = model.model.layers
        assert model.model.embeddings.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
        assert model.lm_head.weight is model.model.embeddings.weight
        for layer in layers:
            mixer = layer.attn
            assert mixer.D.eq(1).all() and mixer.D._no_weight_decay
            assert not mixer.beta_proj.bias.any()
            assert layer.attn_norm.weight.eq(1).all()
            for projection, branches in (
                (mixer.in_proj, 1), (mixer.x_proj, 1), (mixer.beta_proj, 1), (mixer.out_proj, len(layers)),
            ):
                assert_uniform(projection.weight, (projection.in_features * branches) ** -0.5)
            bound = model.config.conv_size ** -0.5
            assert bound * 0.9 < mixer.conv1d.weight.abs().max().item() <= bound * 1.0001
            assert 0 < mixer.conv1d.bias.abs().max().item() <= bound * 1.0001
        assert not torch.equal(layers[0].attn.in_proj.weight, layers[1].attn.in_proj.weight)

    @pytest.mark.parametrize('options, branches', [
        ({}, 1), ({'hidden_ratio': 2}, 2), ({'intermediate_size': 96}, 2), ({'hidden_ratio': 2, 'attn': {}}, 2),
        ({'attn': {}}, 1),
    ], ids=str)
    def test_residual_branches(self, options, branches):
        """Each projection that ends a residual branch, over the square root of the number of branches."""
        if 'attn' in options:
            options = {**options, 'attn': {'layers': [1], 'num_heads': 2}}
        model = LonghornForCausalLM(small(hidden_size=64, **options))
        for block in model.model.layers:
            ends = [getattr(block.attn, 'out_proj', None) or block.attn.o_proj]
            for projection in [*ends, block.mlp.down_proj] if branches == 2 else ends:
                assert_uniform(projection.weight, (projection.in_features * len(model.model.layers) * branches) ** -0.5)

    @pytest.mark.parametrize('name', ['longhorn', 'gla', 'rwkv6'])
    def test_missing_weights_are_initialised_and_the_others_kept(self, name, tmp_path):
        model = LonghornForCausalLM(small(hidden_size=64)) if name == 'longhorn' else make_model(name, 'cpu')
        with torch.no_grad():
            for x in model.parameters():
                x.add_(3.0)
        missing = ('layers.0.attn.D', 'layers.1.', 'lm_head.weight')
        kept = {name: x for name, x in model.state_dict().items() if not any(x in name for x in missing)}
        # it empties the dictionary
        model.save_pretrained(tmp_path, state_dict=dict(kept))
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert kept and all(torch.equal(again.state_dict()[name], x) for name, x in kept.items())
        first, mixer = (layer.attn for layer in again.model.layers[:2])
        assert first.D.eq(1).all() and mixer.D.eq(1).all() and not mixer.beta_proj.bias.any()
        if name == 'longhorn':
            assert_uniform(mixer.out_proj.weight, (mixer.out_proj.in_features * 3) ** -0.5)


def test_options_reach_the_layer():
    options = {
        'state_size': 5, 'expand': 1.5, 'num_heads': 3, 'conv_size': 3, 'conv_bias': False, 'beta_rank': 7, 'use_bias': True,
        'exact': True, 'scalar_beta': True, 'k_norm': 'l2', 'tie_qk': True, 'value_proj': True, 'norm_eps': 1e-3,
        'allow_neg_eigval': True, 'gate': 'channel',
    }
    mixers = [block.attn for block in LonghornModel(small(**options, attn_mode='fused_recurrent')).layers]
    wanted = Longhorn(hidden_size=32, mode='fused_recurrent', **options, layer_idx=1)
    assert repr(mixers[1]) == repr(wanted)
    assert mixers[1].norm_eps == 1e-3
    assert [x.layer_idx for x in mixers] == [0, 1, 2]


def test_hidden_states_and_tuples(device):
    model = LonghornForCausalLM(small()).to(device).eval()
    ids = torch.randint(53, (2, 9), device=device)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(model(ids, return_dict=False)[0], output.logits)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, output.logits)
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, output.logits[:, -1:])
    torch.testing.assert_close(model(ids, logits_to_keep=None).logits, output.logits)


@pytest.mark.parametrize('gate', ['head', 'channel'])
def test_fresh_decays_have_half_lives_of_7_to_700_tokens(gate):
    """For a token of zeros, also where a model is made on `meta`, or its parameters are garbage before `_init_weights`."""
    with torch.device('meta'):
        model = LonghornForCausalLM(small(num_hidden_layers=1, gate=gate, num_heads=4))
    model = model.to_empty(device='cpu')
    for x in model.parameters():
        x.data.fill_(float('nan'))
    model.apply(model._init_weights)
    layer = model.model.layers[0].attn
    half_lives = -math.log(2) / layer.gate(torch.zeros(1, 1, layer.intermediate_size)).flatten()
    assert 7 <= half_lives.min() <= half_lives.max() <= 700
    assert half_lives.max() / half_lives.min() > (20 if gate == 'head' else 80)
    assert {'model.layers.0.attn.gate.A_log', 'model.layers.0.attn.gate.dt_bias'} <= model.no_weight_decay()
