"""`torch.func` and forward mode over whole models: equal to a backward of each sample, or refused in a sentence."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from fla_longhorn import Longhorn, LonghornForCausalLM
from fla_longhorn.ops import backends
from fla_longhorn.selfcheck.compare import relative_error
from tests.models.test_cache import build
from tests.models.test_longhorn import VARIANTS

# gradients of a step size's projection cancel
TOLERANCE = 1e-4


def batch(device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels and a mask with padding on the left, in the middle and on the right."""
    ids, mask = torch.randint(3, 53, (3, 9), device=device), torch.ones(3, 9, dtype=torch.long, device=device)
    mask[0, :3], mask[1, 4], mask[2, -2:] = 0, 0, 0
    return ids, ids.masked_fill(mask == 0, -100), mask


def make(name: str, device) -> LonghornForCausalLM:
    return build(device, num_hidden_layers=2, initializer_range=0.5, **VARIANTS[name])


def loss_of(model, parameters, ids, labels, mask):
    inputs = {'input_ids': ids, 'labels': labels, 'attention_mask': mask}
    return functional_call(model, parameters, (), {name: None if x is None else x[None] for name, x in inputs.items()}).loss


def gradients_apart(model, ids, labels, mask) -> list[dict[str, torch.Tensor]]:
    results = []
    for i in range(len(ids)):
        row = {'labels': labels[i:i + 1]} | ({} if mask is None else {'attention_mask': mask[i:i + 1]})
        named = dict(model.named_parameters())
        results.append(dict(zip(named, torch.autograd.grad(model(ids[i:i + 1], **row).loss, named.values()), strict=True)))
    return results


@pytest.mark.filterwarnings('ignore:.*batching rule')
@pytest.mark.parametrize('padded', [False, True], ids=['', 'mask'])
@pytest.mark.parametrize('name', ['paper', 'exact', 'plain powlu', 'linear loss, l2warp'])
def test_gradients_of_each_sample(name, padded, device):
    """As differential privacy and influence functions take them: fla's functions are not asked, and masks are not read."""
    model = make(name, device).train(padded)
    ids, labels, mask = batch(device)
    mask = mask if padded else None
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, *row):
        return loss_of(model, parameters, *row)

    got = vmap(grad(loss), (None, 0, 0, 0 if padded else None))(parameters, ids, labels, mask)
    for i, expected in enumerate(gradients_apart(model, ids, labels, mask)):
        assert got.keys() == expected.keys()
        errors = {name: relative_error(got[name][i], x) for name, x in expected.items()}
        assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize('mode', ['jvp', 'dual numbers'])
@pytest.mark.parametrize('name', ['paper', 'exact'])
def test_forward_mode(name, mode, device):
    """The derivative along a direction is the gradients' product with it."""
    model = make(name, device)
    row = [x[0] for x in batch(device)]
    (expected,) = gradients_apart(model, *(x[None] for x in row))
    parameters = {name: x.detach() for name, x in model.named_parameters()}
    tangents = {name: torch.randn_like(x) * x.norm() for name, x in parameters.items()}
    if mode == 'jvp':
        _, got = jvp(lambda p: loss_of(model, p, *row), (parameters,), (tangents,))
    else:
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(x, tangents[name]) for name, x in parameters.items()}
            got = forward_ad.unpack_dual(loss_of(model, duals, *row)).tangent
    products = torch.stack([(expected[name] * x).sum() for name, x in tangents.items()])
    assert (got - products.sum()).abs() <= 1e-4 * products.abs().sum()


def test_refused(device):
    """Attention, and boundaries that would have to be read."""
    ids, labels, _ = batch(device)
    for options, keywords, message in (
        ({'attn': {'layers': [1], 'num_heads': 2}}, {}, r'layer 1 is an attention layer \(config.attn\)'),
        ({}, {'position_ids': torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]], device=device)}, 'position_ids must be None'),
    ):
        model = build(device, **options)
        with pytest.raises(ValueError, match=message):
            vmap(lambda x, y, model=model, keywords=keywords: model(x[None], labels=y[None], **keywords).loss)(ids, labels)


@pytest.mark.filterwarnings('ignore:.*batching rule')
def test_batched_gradients(device):
    """Many gradients of one call: by `torch.func.vmap`, whose older form is refused by name."""
    layer = Longhorn(hidden_size=16, state_size=4).to(device)
    h = torch.randn(2, 9, 16, device=device, requires_grad=True)
    o = layer(h)[0]
    do = torch.randn(3, *o.shape, device=device)
    expected = torch.stack([torch.autograd.grad(o, h, x, retain_graph=True)[0] for x in do])
    backward = torch.func.vjp(lambda x: layer(x)[0], h.detach())[1]
    assert relative_error(vmap(backward)(do)[0], expected) <= TOLERANCE
    if device.type == 'cpu' and backends.loops is not None:
        with pytest.raises(NotImplementedError, match='no batched gradients .is_grads_batched=True, vectorize=True.'):
            torch.autograd.grad(o, h, do, is_grads_batched=True)
