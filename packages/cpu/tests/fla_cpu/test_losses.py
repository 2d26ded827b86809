import pytest
import torch
import torch.nn.functional as F
from fla.modules import FusedLinearCrossEntropyLoss
from fla.modules.fused_cross_entropy import cross_entropy_loss

from tests.reference import DTYPES, assert_close, compare, strided, tensor

OPTIONS = [
    {},
    {'label_smoothing': 0.1},
    {'logit_scale': 0.7},
    {'logit_scale': -1.5, 'label_smoothing': 0.2},
    {'logit_softcapping': 3.0},
    {'ignore_index': 4},
    {'logit_scale': 1.3, 'logit_softcapping': 5.0, 'label_smoothing': 0.05, 'ignore_index': 4},
]


@pytest.fixture(params=[1 << 19, 40], ids=['one block', 'blocks'])
def block_elements(request, monkeypatch):
    """Also with blocks of a row or two, which the small tensors of these tests would not fill."""
    for name in ('BLOCK_ELEMENTS', 'MATMUL_BLOCK_ELEMENTS'):
        monkeypatch.setattr(f'fla_cpu.losses.{name}', request.param)


def cross_entropy(
    logits, target, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None, ignore_index=-100,
):
    """The loss of every row and the z-loss that it contains."""
    logits = logits * logit_scale
    if logit_softcapping is not None:
        logits = logit_softcapping * torch.tanh(logits / logit_softcapping)
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction='none')
    z_loss = lse_square_scale * logits.logsumexp(-1).square() * (target != ignore_index)
    return loss + z_loss, z_loss


def targets(rows, classes, ignore_index=-100):
    target = torch.randint(0, classes, (rows,))
    target[::3] = ignore_index
    return target


@pytest.mark.parametrize('options', OPTIONS)
@pytest.mark.parametrize('lse_square_scale', [0.0, 0.01])
@pytest.mark.parametrize('dtype', DTYPES)
def test_cross_entropy(options, lse_square_scale, dtype, block_elements):
    options = {**options, 'lse_square_scale': lse_square_scale}
    target = targets(11, 19, options.get('ignore_index', -100))

    def function(logits):
        loss, z_loss = cross_entropy_loss(logits, target, **options)
        assert loss.dtype == torch.float32
        assert_close('z-loss', z_loss, cross_entropy(logits.detach().double(), target, **options)[1], 1e-5)
        return (loss,)

    logits = strided(11, 19, dtype=dtype)
    compare(function, lambda logits: cross_entropy(logits, target, **options)[:1], {'logits': logits}, dtype)


@pytest.mark.parametrize('options', OPTIONS)
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('dtype', DTYPES)
def test_linear_cross_entropy(options, reduction, bias, dtype):
    ignore_index = options.get('ignore_index', -100)
    target = targets(26, 40, ignore_index)
    inputs = {
        'x': strided(2, 13, 8, dtype=dtype),
        'weight': tensor(40, 8, dtype=dtype),
        'bias': tensor(40, dtype=dtype) if bias else None,
    }

    def reference(x, weight, bias):
        loss, _ = cross_entropy(F.linear(x.flatten(0, 1), weight, bias), target, **options)
        return (loss.sum() / ((target != ignore_index).sum() if reduction == 'mean' else 1),)

    criterion = FusedLinearCrossEntropyLoss(reduction=reduction, num_chunks=3, **options)
    # the logits and their gradients are in the dtype of the weight, as they are in plain PyTorch
    compare(
        lambda x, weight, bias: (criterion(x, target.view(2, 13), weight, bias),), reference, inputs, dtype,
        plain=dtype != torch.float32,
    )


def test_ignored_rows_are_not_read():
    """So they cost nothing: even NaN in them changes nothing."""
    target = torch.tensor([0, -100, -100, 3, 4])
    kept = target != -100
    x, weight = torch.where(kept[:, None], torch.randn(5, 4), float('nan')).requires_grad_(), tensor(10, 4)
    loss = FusedLinearCrossEntropyLoss()(x, target, weight)
    want = FusedLinearCrossEntropyLoss()(x[kept], target[kept], weight)
    assert loss == want
    for got, wanted in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(want, (x, weight)), strict=True):
        assert torch.equal(got, wanted)

    logits = torch.where(kept[:, None], torch.randn(5, 10), float('nan')).requires_grad_()
    losses, _ = cross_entropy_loss(logits, target)
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad.isfinite().all() and (logits.grad[~kept] == 0).all()


def test_second_backward_is_scaled_once():
    x, weight, target = tensor(6, 4), tensor(10, 4), targets(6, 10)
    loss = FusedLinearCrossEntropyLoss()(x, target, weight)
    first = torch.autograd.grad(loss, (x, weight), torch.tensor(3.0), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight), torch.tensor(3.0))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.ne(0).any()
