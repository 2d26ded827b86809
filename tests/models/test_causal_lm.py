"""Logits and loss of the models, swapped families too: what stays after backward, and labels that are shifted already."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.selfcheck.compare import relative_error
from tests.integration.swapped import make_model, tokens, with_slow
from tests.models.test_cache import build

LINEAR = {'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True}
LOSSES = {
    'fused': {}, 'plain': {'fuse_cross_entropy': False}, 'linear': LINEAR,
    'fused, l2warp': {'use_l2warp': True}, 'plain, l2warp': {'fuse_cross_entropy': False, 'use_l2warp': True},
    'linear, l2warp': {**LINEAR, 'use_l2warp': True},
}
models = pytest.mark.parametrize('name', with_slow(['longhorn', *FAMILIES]))


def make(name: str, device, **options) -> nn.Module:
    return build(device, **options) if name == 'longhorn' else make_model(name, device, **options)


def inputs(device, *shape: int) -> torch.Tensor:
    return tokens(device, *shape) % 50


@models
def test_logits_stay(name, device):
    model = make(name, device, fuse_linear_cross_entropy=False).eval()
    ids = inputs(device, 2, 9)
    for labels in ({'labels': ids}, {'shift_labels': F.pad(ids[:, 1:], (0, 1), value=-100)}):
        output = model(ids, **labels)
        before = output.logits.detach().clone()
        output.loss.backward()
        assert torch.equal(output.logits, before)
        assert torch.equal(before, model(ids).logits)


@pytest.mark.parametrize('options', [{}, {'fuse_cross_entropy': False}, LINEAR], ids=['fused', 'plain', 'linear'])
@pytest.mark.parametrize('name', ['longhorn', 'gla'])
@pytest.mark.parametrize('argument', ['labels', 'shift_labels'])
def test_labels_of_another_shape(name, options, argument, device):
    """Flattened, their rows would be compared with others, and many shapes give a plausible loss."""
    model, ids = make(name, device, **options), inputs(device, 3, 12)
    for labels in (ids[:, :5], ids[:1], F.pad(ids, (0, 4), value=-100), ids.T):
        message = f'{argument} must have shape [B, T] = [3, 12], got {list(labels.shape)}'
        with pytest.raises(ValueError, match=re.escape(message)):
            model(ids, **{argument: labels})
    one = model(ids[:1], **{argument: ids[0]}).loss
    assert one == model(ids[:1], **{argument: ids[:1]}).loss


def test_a_criterion_of_the_users_own(device):
    """fla's, which trades the logits for memory, and one of PyTorch's with another index for ignored labels."""
    model, ids = build(device), inputs(device, 2, 9)
    expected = model(ids, labels=ids).loss
    model.criterion = FusedCrossEntropyLoss(inplace_backward=True)
    output = model(ids, labels=ids)
    assert torch.equal(output.loss, expected)
    before = output.logits.detach().clone()
    output.loss.backward()
    assert not torch.equal(output.logits, before)
    model.criterion = nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1)
    labels = ids.masked_fill(ids % 3 == 0, 7)
    want = F.cross_entropy(
        model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=7, label_smoothing=0.1, reduction='sum',
    )
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=5).loss, want / 5)
    # summed for that call, and the user's own stays as it is
    assert model.criterion.reduction == 'mean'
    torch.testing.assert_close(model(ids, labels=labels).loss, want / (labels[:, 1:] != 7).sum())
    model.criterion = nn.Identity()
    with pytest.raises(ValueError, match='criterion must have an attribute reduction'):
        model(ids, labels=ids, num_items_in_batch=5)


@pytest.mark.parametrize('loss', list(LOSSES))
def test_losses_agree_with_autograd(loss, device):
    """Loss and gradient in PyTorch, from the logits; L2 warp is a gradient at the largest logit of each row."""
    model, ids = build(device, **LOSSES[loss]).train(), inputs(device, 2, 9)
    labels = ids.masked_fill(ids % 4 == 0, -100)
    assert (labels != ids).any()
    for items in (None, 5):
        got = model(ids, labels=labels, num_items_in_batch=items).loss
        gradients = torch.autograd.grad(got, list(model.parameters()))
        logits = model(ids).logits
        reduction = 'mean' if items is None else 'sum'
        want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)
        penalty = 0.5e-4 * logits.max(-1).values.square().sum() / 18 if 'l2warp' in loss else torch.zeros((), device=device)
        expected = torch.autograd.grad((want + penalty) / (items or 1), list(model.parameters()))
        torch.testing.assert_close(got, want / (items or 1))
        errors = [relative_error(a, b) for a, b in zip(gradients, expected, strict=True)]
        assert max(errors) <= 1e-4, errors


def assert_nothing_changes(model, ids):
    """By a step without a target, the L2 penalty included; divided by no items, the loss is 0."""
    nothing = torch.full_like(ids, getattr(model.criterion, 'ignore_index', -100))
    for labels in ('labels', 'shift_labels'):
        for items in (None, 0, torch.tensor(0), torch.tensor(0.)):
            model.zero_grad()
            loss = model(ids, **{labels: nothing}, num_items_in_batch=items).loss
            loss.backward()
            assert all(p.grad is None or not p.grad.any() for p in model.parameters()), (labels, items)
            assert items is None or loss == 0, (labels, items)


@models
@pytest.mark.parametrize('loss', list(LOSSES))
def test_nothing_to_predict(name, loss, device):
    model, ids = make(name, device, **LOSSES[loss]).train(), inputs(device, 2, 9)
    assert_nothing_changes(model, ids)
    # the loss that is fused with the head, in PyTorch
    model.lm_head.register_forward_hook(lambda *args: None)
    assert_nothing_changes(model, ids)


@models
@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_shifted_labels(name, training, device):
    """As context parallelism hands them over, beside `labels` or alone: each shard's last target is the next one's first."""
    model, ids = make(name, device).train(training), inputs(device, 2, 10)
    given, targets = ids[:, :9], ids[:, 1:].clone()
    targets[0, :4] = -100
    logits = model.lm_head(model.model(given)[0])
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='sum')
    for labels in ({}, {'labels': torch.zeros_like(given)}):
        labels |= {'shift_labels': targets, 'num_items_in_batch': 7}
        output = model(given, **labels)
        torch.testing.assert_close(output.loss, want / 7)
        assert torch.equal(model(given, return_dict=False, **labels)[0], output.loss)
