"""Vision Longhorn as a model of timm, and docs/vision.md."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from fla_longhorn.contrib.timm.variants import resize_positions
from tests.contrib.timm.models import SMALL_IMAGES, TINY, images, small
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


def test_features_only(device):
    model = timm.create_model(TINY, features_only=True, out_indices=(0, 2), **SMALL_IMAGES).to(device)
    assert [x.shape for x in model(images(device))] == [(2, 32, 3, 5)] * 2
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


def test_weight_decay(device):
    model = small(device)
    plain, decayed = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    spared = {name for name, x in model.named_parameters() if any(x is y for y in plain['params'])}
    assert {name.rsplit('.', 1)[-1] for name in spared} == {'cls_token', 'pos_embed', 'D', 'bias', 'weight'}
    norms = {'norm.weight', *(f'blocks.{i}.norm.weight' for i in range(3))}
    assert {name for name in spared if name.endswith('weight')} == norms
    assert model.blocks[0].mixer.D._no_weight_decay
    assert len(plain['params']) + len(decayed['params']) == len(list(model.parameters()))


def test_layer_decay(device):
    groups = param_groups_layer_decay(small(device), 0.1, layer_decay=0.5)
    # stem, three blocks, norm and head
    assert sorted({group['lr_scale'] for group in groups}) == [0.5**i for i in (4, 3, 2, 1, 0)]


def test_from_the_meta_device(device):
    model = timm.create_model(TINY, device='meta', **SMALL_IMAGES).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float('nan'))
    model.init_weights()
    assert all(x.isfinite().all() for x in model.parameters()) and model(images(device)).isfinite().all()
    assert torch.equal(model.blocks[0].mixer.D, torch.ones(128, device=device))


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
