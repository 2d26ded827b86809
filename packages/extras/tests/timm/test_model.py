"""Vision Longhorn as a model of timm, and docs/vision.md."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay

from packages.extras.tests.timm.models import SMALL_IMAGES, TINY, gates, images, small
from packages.tests.test_docs import execute_page


def test_class_token_in_the_middle(device):
    """15 patches: the first 7 stand before it, and it comes first outside."""
    model, seen = small(device), []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    features = model.forward_features(images(device))
    patches = model.patch_embed(images(device)).flatten(1, 2) + model.pos_embed[:, 1:]
    token = (model.cls_token + model.pos_embed[:, :1]).expand(2, -1, -1)
    torch.testing.assert_close(seen[0], torch.cat([patches[:, :7], token, patches[:, 7:]], 1))
    torch.testing.assert_close(features, torch.cat([seen[1][:, 7:8], seen[1][:, :7], seen[1][:, 8:]], 1))
    torch.testing.assert_close(model.forward_head(features, pre_logits=True), features[:, 0])


@pytest.mark.parametrize('bidirectional', [True, False])
def test_who_sees_whom(bidirectional, device):
    model, x = small(device, bidirectional=bidirectional), images(device, 1)
    y = x.clone()
    y[..., -4:, -4:] += 1
    moved = (model.forward_features(x) - model.forward_features(y)).abs().amax(-1)[0] > 0
    # token 0 is the class token in the middle, the last patch is the one that changed
    assert moved[1:8].all() == bidirectional and moved[0] == bidirectional and moved[-1]


def test_intermediates(device):
    model = small(device)
    features, maps = model.forward_intermediates(images(device), norm=True)
    torch.testing.assert_close(features, model.forward_features(images(device)))
    assert [x.shape for x in maps] == [(2, 32, 3, 5)] * 3
    torch.testing.assert_close(maps[-1].flatten(2).mT, features[:, 1:])
    rows = model.forward_intermediates(
        images(device), indices=[0, 2], return_prefix_tokens=True, norm=True, output_fmt='NLC', intermediates_only=True,
    )
    torch.testing.assert_close(torch.cat(rows[1][::-1], 1), features)
    early = model.forward_intermediates(images(device), indices=[0], stop_early=True, intermediates_only=True)
    late = model.forward_intermediates(images(device), indices=[0], intermediates_only=True)
    torch.testing.assert_close(early, late)
    named = model.forward_intermediates(images(device), output_dict=True, return_prefix_tokens=True)
    assert set(named) == {'image_intermediates', 'image_intermediates_prefix', 'image_features'}
    with pytest.raises(ValueError, match='output_fmt'):
        model.forward_intermediates(images(device), output_fmt='NHWC')


def test_other_sizes(device):
    model, x = small(device), images(device, 2, (16, 16))
    with pytest.raises(AssertionError, match='Input height'):
        model(x)
    free = small(device, dynamic_img_size=True)
    free.load_state_dict(model.state_dict())
    torch.testing.assert_close(free(images(device)), model(images(device)))
    logits = free(x)
    model.set_input_size(img_size=(16, 16))
    torch.testing.assert_close(model(x), logits)
    assert small(device, dynamic_img_size=True, dynamic_img_pad=True)(images(device, 1, (13, 18))).shape == (1, 5)


def test_reset_classifier(device):
    model = small(device)
    model.reset_classifier(3, 'avg')
    assert model(images(device)).shape == (2, 3) and model.num_classes == 3
    model.reset_classifier(0)
    assert model(images(device)).shape == (2, 32)
    for call in (lambda: model.reset_classifier(3, 'map'), lambda: small(device, global_pool='map')):
        with pytest.raises(ValueError, match='global_pool'):
            call()


@gates
def test_weight_decay(gate, device):
    model = small(device, gate=gate)
    plain, decayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    spared = {name for name, x in model.named_parameters() if any(x is y for y in plain['params'])}
    of_mixers = {'D'} if gate is None else {'D', 'A_log', 'dt_bias'}
    assert {name.rsplit('.', 1)[-1] for name in spared} == {'cls_token', 'pos_embed', 'bias', 'weight'} | of_mixers
    # timm spares vectors by itself, other training code those that are named or marked
    named = {name for name in spared if name.rsplit('.', 1)[-1] in of_mixers}
    assert model.no_weight_decay() == named | {'cls_token', 'pos_embed'}
    assert all(model.get_parameter(name)._no_weight_decay for name in named)
    norms = {'norm.weight', *(f'blocks.{i}.norm.weight' for i in range(3))}
    assert {name for name in spared if name.endswith('weight')} == norms
    assert len(plain['params']) + len(decayed['params']) == len(list(model.parameters()))


def assert_fresh_gates(model):
    """Half-lives of 7 to 700 patches in equal ratios, in both directions; the middle of them where there is only one."""
    for block in model.blocks:
        for gate in block.mixer.gate or ():
            shares = (torch.arange(len(gate.dt_bias), device=gate.dt_bias.device) + 0.5) / len(gate.dt_bias)
            torch.testing.assert_close(math.log(2) / F.softplus(gate.dt_bias), 700 * 0.01**shares, rtol=1e-4, atol=0)
            assert len(shares) in (1, 64) and not gate.A_log.any()


@gates
def test_from_the_meta_device(gate, device):
    options = dict(SMALL_IMAGES, gate=gate)
    assert_fresh_gates(timm.create_model(TINY, **options))
    model = timm.create_model(TINY, device='meta', **options).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float('nan'))
    model.init_weights()
    assert all(x.isfinite().all() for x in model.parameters()) and model(images(device)).isfinite().all()
    assert torch.equal(model.blocks[0].mixer.D, torch.ones(128, device=device))
    assert_fresh_gates(model)
    half = timm.create_model(TINY, device=device, dtype=torch.bfloat16, **options)
    assert {(x.dtype, x.device.type) for x in half.parameters()} == {(torch.bfloat16, device.type)}


@pytest.mark.parametrize('gate', ['head', 'channel'])
def test_gate_for_trained_weights(gate, device):
    """A model with a gate takes the weights of one without, and is that model where nothing decays."""
    plain, model = small(device), timm.create_model(TINY, gate=gate, **SMALL_IMAGES).to(device).eval()
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert len(missing) == 3 * 2 * 4 and all('.mixer.gate.' in name for name in missing) and not unexpected
    found = model(images(device))
    assert (found - plain(images(device))).abs().max() > 1e-3
    again = small(device, gate=gate)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images(device)), found)
    for name in missing:
        if name.endswith('dt_bias'):
            torch.nn.init.constant_(model.get_parameter(name), -math.inf)
    torch.testing.assert_close(model(images(device)), plain(images(device)))


def test_last_projections_begin_smaller_with_depth(device):
    """By the root of the number of blocks, whose outputs are added."""
    for block in (model := small(device)).blocks:
        weight = block.mixer.out_proj.weight
        bound = (weight.shape[1] * len(model.blocks))**-0.5
        assert 0.98 * bound < weight.abs().max().item() <= bound


def test_page(tmp_path, device):
    execute_page('vision.md', tmp_path, device)
