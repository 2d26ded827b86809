"""Vision Longhorn as a model of timm, and docs/vision.md."""

import copy
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from fla_longhorn_extras.timm.variants import resize_positions
from packages.extras.tests.timm.models import SMALL_IMAGES, TINY, gates, images, small
from tests.test_docs import execute_page


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


@pytest.mark.parametrize('pool', ['', 'token', 'avg', 'max', 'avgmax'])
def test_pools(pool, device):
    model = small(device, global_pool=pool)
    features = model.forward_features(images(device))
    logits = model(images(device))
    tokens = features[:, 1:]
    expected = {
        '': features, 'token': features[:, 0], 'avg': tokens.mean(1), 'max': tokens.amax(1),
        'avgmax': (tokens.mean(1) + tokens.amax(1)) / 2,
    }[pool]
    torch.testing.assert_close(logits, model.head(expected))


def test_without_class_token(device):
    model = small(device, class_token=False, global_pool='avg')
    assert model.forward_features(images(device)).shape == (2, 15, 32) and 'cls_token' not in dict(model.named_parameters())
    with pytest.raises(ValueError, match='global_pool'):
        small(device, class_token=False)


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


@gates
def test_features_only(gate, device):
    whole = small(device, gate=gate)
    model = timm.create_model(TINY, features_only=True, out_indices=(0, 2), gate=gate, **SMALL_IMAGES).to(device)
    model.model.load_state_dict(whole.state_dict(), strict=False)
    maps = model(images(device))
    assert [x.shape for x in maps] == [(2, 32, 3, 5)] * 2
    expected = whole.forward_intermediates(images(device), indices=[0, 2], intermediates_only=True)
    torch.testing.assert_close(maps, expected)
    assert model.feature_info.channels() == [32, 32] and model.feature_info.reduction() == [4, 4]


def test_prune(device):
    model = small(device)
    expected = model.forward_intermediates(images(device), indices=[1], intermediates_only=True)[0]
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
    assert len(model.blocks) == 2 and isinstance(model.get_classifier(), torch.nn.Identity)
    torch.testing.assert_close(model.forward_features(images(device))[:, 1:], expected.flatten(2).mT)


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


def test_checkpoint_of_another_size(tmp_path, device):
    model, path = small(device), tmp_path / 'model.pt'
    torch.save(model.state_dict(), path)
    other = timm.create_model(TINY, **dict(SMALL_IMAGES, img_size=(16, 16)))
    other.load_state_dict(torch.load(path) | {'pos_embed': other.pos_embed.detach()})
    # timm's resampling takes a square grid from the number of positions
    square = timm.create_model(TINY, **dict(SMALL_IMAGES, img_size=(8, 8)))
    resized = resize_positions(square.state_dict(), other)
    assert resized['pos_embed'].shape == (1, 17, 32)
    other.load_state_dict(resized)
    assert resize_positions(model.state_dict(), model)['pos_embed'].shape == (1, 16, 32)


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


@gates
def test_layer_decay(gate, device):
    groups = param_groups_layer_decay(small(device, gate=gate), 0.1, layer_decay=0.5)
    # stem, three blocks, norm and head
    assert sorted({group['lr_scale'] for group in groups}) == [0.5**i for i in (4, 3, 2, 1, 0)]


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


PROGRAMS = {
    'trace': lambda model, x: torch.jit.trace(model, x, check_trace=False),
    'export': lambda model, x: torch.export.export(
        model, (x,), dynamic_shapes=({0: torch.export.Dim('batch', min=2, max=64)},),
    ).module(),
    'compile': lambda model, x: torch.compile(model, backend='aot_eager', fullgraph=True),
    'copy': lambda model, x: copy.deepcopy(model),
}


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@gates
@pytest.mark.parametrize('program', PROGRAMS)
def test_programs(program, gate, device):
    model = small(device, gate=gate, exact=True)
    run = PROGRAMS[program](model, images(device))
    torch.testing.assert_close(run(images(device)), model(images(device)), rtol=1e-4, atol=1e-5)


def test_last_projections_begin_smaller_with_depth(device):
    """By the root of the number of blocks, whose outputs are added."""
    for block in (model := small(device)).blocks:
        weight = block.mixer.out_proj.weight
        bound = (weight.shape[1] * len(model.blocks))**-0.5
        assert 0.98 * bound < weight.abs().max().item() <= bound


def test_gradient_checkpointing(device):
    model, found = small(device).train(), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images(device)).square().sum().backward()
        found.append([x.grad for x in model.parameters()])
    torch.testing.assert_close(*found)


def test_page(tmp_path, device):
    execute_page('vision.md', tmp_path, device)
