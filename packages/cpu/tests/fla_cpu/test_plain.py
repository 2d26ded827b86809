"""What stands for fla's modules in a checkout without this package (`tests/plain_fla.py`) computes what they do with it."""

from functools import partial

import pytest
import torch
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss, activations, mlp, token_shift
from fla.modules.norm import layernorm
from fla.modules.rotary import ops as rotary

from tests import plain_fla
from tests.reference import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, assert_close

PACKED = torch.tensor([0, 4, 5, 9])


def results(function, inputs, options):
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((y.float() * torch.linspace(1, 2, y.numel()).view_as(y)).sum() for y in outputs).backward()
    return outputs, {name: x.grad for name, x in leaves.items()}


def norm(name, **options):
    bias = {'bias': torch.randn(8)} if name == 'layer_norm' else {}
    inputs = {'x': torch.randn(2, 3, 8), 'weight': torch.rand(8), **bias}
    return getattr(layernorm, name), getattr(plain_fla, name), inputs, {'bias': None, **options} if not bias else options


def with_residual(name):
    fused, plain, inputs, options = norm(name, prenorm=True)
    return fused, plain, inputs | {'residual': torch.randn(2, 3, 8)}, options


def half(name):
    fused, plain, inputs, options = norm(name, prenorm=True, residual_in_fp32=True)
    return fused, plain, {key: x.bfloat16() for key, x in inputs.items()}, options


def gated(name):
    inputs = {x: torch.randn(2, 5, 8) for x in 'xy'}
    if name == 'swiglu_linear':
        inputs |= {'weight': torch.randn(3, 8), 'bias': torch.randn(3)}
    # fla's takes no keywords
    return lambda **given: getattr(mlp, name)(*given.values()), getattr(plain_fla, name), inputs, {}


def loss(**options):
    criterion = FusedCrossEntropyLoss(**options)
    target = torch.randint(11, (6,)).index_fill(0, torch.tensor([2]), -100)
    return criterion, partial(plain_fla.cross_entropy, criterion), {'input': torch.randn(6, 11)}, {'target': target}


def linear_loss(**options):
    criterion = FusedLinearCrossEntropyLoss(**options)
    target = torch.randint(11, (2, 3)).index_fill(1, torch.tensor([2]), -100)
    inputs = {'x': torch.randn(2, 3, 8), 'weight': torch.randn(11, 8), 'bias': torch.randn(11)}
    return criterion, partial(plain_fla.linear_cross_entropy, criterion), inputs, {'target': target}


def rotate(shape, **options):
    angles = torch.rand(20, 3)
    options |= {'cos': angles.cos(), 'sin': angles.sin()}
    return rotary.rotary_embedding, plain_fla.rotary_embedding, {'x': torch.randn(shape)}, options


def shift(shape, rows, **options):
    inputs = {'x': torch.randn(shape), **({'cache': torch.randn(rows, 8)} if rows else {})}
    return token_shift.token_shift, plain_fla.token_shift, inputs, {'output_cache': True, **options}


def square():
    return lambda x: activations.ACT2FN['sqrelu'](x), plain_fla.square_relu, {'x': torch.randn(2, 5)}, {}


CASES = {
    'rms_norm': partial(norm, 'rms_norm'),
    'rms_norm, residual': partial(with_residual, 'rms_norm'),
    'rms_norm, bfloat16': partial(half, 'rms_norm'),
    'layer_norm': partial(norm, 'layer_norm'),
    'layer_norm, residual': partial(with_residual, 'layer_norm'),
    'swiglu': partial(gated, 'swiglu'),
    'swiglu_linear': partial(gated, 'swiglu_linear'),
    'loss': loss,
    'loss, sum': partial(loss, reduction='sum'),
    'linear loss': linear_loss,
    'linear loss, l2warp': partial(linear_loss, use_l2warp=True),
    'rotary': partial(rotate, (2, 5, 3, 8), seqlen_offsets=4),
    'rotary, offsets': partial(rotate, (2, 5, 3, 6), seqlen_offsets=torch.tensor([-2, 7])),
    'rotary, packed': partial(rotate, (1, 9, 3, 6), seqlen_offsets=torch.tensor([0, 3, 1]), cu_seqlens=PACKED),
    'token_shift': partial(shift, (2, 5, 8), 0),
    'token_shift, cache': partial(shift, (2, 5, 8), 2),
    'token_shift, packed': partial(shift, (1, 9, 8), 3, cu_seqlens=PACKED),
    'sqrelu': square,
}


@pytest.mark.parametrize('name', list(CASES))
def test_as_fla_with_the_package(name):
    fused, plain, inputs, options = CASES[name]()
    expected, gradients = results(fused, inputs, options)
    got, own = results(plain, inputs, options)
    dtype = expected[0].dtype
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert_close(f'output {i}', x, y, OUTPUT_TOLERANCE[dtype])
    for key, x in gradients.items():
        assert_close(f'gradient of {key}', own[key], x, GRADIENT_TOLERANCE[dtype])


def test_nothing_is_replaced_here():
    assert plain_fla.HAS_PACKAGE
    assert layernorm.rms_norm.__code__.co_filename == layernorm.__file__
