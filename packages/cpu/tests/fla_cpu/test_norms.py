from functools import partial

import fla.modules as modules
import pytest
import torch
import torch.nn.functional as F
from fla.modules.norm import fused_norm_gate, l2norm, layernorm
from torch.func import functional_call

from tests.reference import DTYPES, compare, norm, strided, tensor

KINDS = {'layer': (False, 1), 'rms': (True, 1), 'group': (False, 4), 'group_rms': (True, 4)}


def parameters(hidden, dtype, weight=True, bias=True):
    return {
        'weight': tensor(hidden, dtype=dtype) if weight else None,
        'bias': tensor(hidden, dtype=dtype) if bias else None,
    }


def call(build, x, *args, weight, bias, **options):
    """A module's output with these parameters: the reference is given the same ones."""
    given = {'weight': weight, 'bias': bias}
    module = build(x.shape[-1], elementwise_affine=weight is not None)
    return functional_call(module, {name: value for name, value in given.items() if value is not None}, (x, *args), options)


def norm_of(kind, x, weight, bias, **options):
    is_rms_norm, num_groups = KINDS[kind]
    cls = modules.RMSNorm if is_rms_norm else modules.LayerNorm
    if num_groups > 1:
        cls = partial(modules.GroupNorm, num_groups, is_rms_norm=is_rms_norm)
    return call(partial(cls, bias=bias is not None), x, weight=weight, bias=bias, **options)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(('weight', 'bias'), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize('dtype', [*DTYPES, torch.float64])
@pytest.mark.parametrize('hidden', [12, 68])
def test_norm(kind, weight, bias, dtype, hidden):
    is_rms_norm, num_groups = KINDS[kind]
    inputs = {'x': strided(2, 7, hidden, dtype=dtype), **parameters(hidden, dtype, weight, bias)}

    def reference(x, weight, bias):
        return (norm(x, weight, bias, 1e-5, is_rms_norm, num_groups),)

    compare(lambda **given: (norm_of(kind, **given),), reference, inputs, dtype)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('residual_dtype', [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize('residual_in_fp32', [False, True])
def test_residual_stream(kind, dtype, residual_dtype, residual_in_fp32):
    hidden = 24
    is_rms_norm, num_groups = KINDS[kind]
    residual = None if residual_dtype is None else strided(3, 5, hidden, dtype=residual_dtype)
    inputs = {'x': strided(3, 5, hidden, dtype=dtype), 'residual': residual, **parameters(hidden, torch.float32)}

    def reference(x, residual, weight, bias):
        stream = x if residual is None else x + residual
        return norm(stream, weight, bias, 1e-5, is_rms_norm, num_groups), stream

    def function(x, residual, weight, bias):
        options = {'residual': residual, 'prenorm': True, 'residual_in_fp32': residual_in_fp32}
        y, stream = norm_of(kind, x, weight, bias, **options)
        assert y.dtype == dtype
        assert stream.dtype == (residual_dtype or (torch.float32 if residual_in_fp32 else dtype))
        return y, stream

    # the stream is rounded to its own dtype before the backward reads it
    coarsest = dtype if residual_dtype in (None, torch.float32) else torch.bfloat16
    compare(function, reference, inputs, coarsest)


@pytest.mark.parametrize('kind', [*KINDS, 'gated layer', 'gated rms'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_norm_linear_recomputes_its_input(kind, dtype):
    is_rms_norm, num_groups = KINDS[kind.removeprefix('gated ')]
    inputs = {
        'x': tensor(2, 6, 32, dtype=dtype),
        'residual': tensor(2, 6, 32, dtype=torch.float32),
        **parameters(32, dtype),
        'matrix': tensor(48, 32, dtype=dtype),
        'shift': tensor(48, dtype=dtype),
        'g': tensor(2, 6, 32, dtype=dtype) if 'gated' in kind else None,
    }
    gated_linear = fused_norm_gate.rms_norm_swish_gate_linear if is_rms_norm else fused_norm_gate.layer_norm_swish_gate_linear

    def reference(x, residual, weight, bias, matrix, shift, g):
        y = norm(x + residual, weight, bias, 1e-5 if g is None else 1e-6, is_rms_norm, num_groups)
        return F.linear(y if g is None else y * F.silu(g), matrix, shift), x + residual

    def function(x, residual, weight, bias, matrix, shift, g):
        options = {'residual': residual, 'prenorm': True}
        if g is not None:
            return gated_linear(x, g, weight, bias, matrix, shift, **options)
        options |= {'is_rms_norm': is_rms_norm, 'num_groups': num_groups}
        return layernorm.group_norm_linear(x, weight, bias, matrix, shift, **options)

    compare(function, reference, inputs, dtype)


@pytest.mark.parametrize('is_rms_norm', [False, True])
@pytest.mark.parametrize('activation', ['swish', 'silu', 'sigmoid'])
@pytest.mark.parametrize('affine', [True, False])
@pytest.mark.parametrize('dtype', DTYPES)
def test_gated_norm(is_rms_norm, activation, affine, dtype):
    hidden = 20
    inputs = {
        'x': strided(2, 5, hidden, dtype=dtype),
        'g': strided(2, 5, hidden, dtype=dtype),
        'residual': tensor(2, 5, hidden, dtype=torch.float32),
        **parameters(hidden, dtype, affine, affine and not is_rms_norm),
    }

    def reference(x, g, residual, weight, bias):
        gate = torch.sigmoid(g) if activation == 'sigmoid' else F.silu(g)
        return norm(x + residual, weight, bias, 1e-5, is_rms_norm) * gate, x + residual

    def function(x, g, residual, weight, bias):
        cls = modules.FusedRMSNormGated if is_rms_norm else partial(modules.FusedLayerNormGated, bias=affine)
        return call(partial(cls, activation=activation), x, g, residual, weight=weight, bias=bias, prenorm=True)

    compare(function, reference, inputs, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('output_dtype', [None, torch.float32])
def test_l2norm(dtype, output_dtype):
    inputs = {'x': strided(2, 5, 3, 17, dtype=dtype)}

    def function(x):
        y = l2norm.l2norm(x, eps=1e-3, output_dtype=output_dtype)
        assert y.dtype == (output_dtype or dtype)
        return (y,)

    compare(function, lambda x: (x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt(),), inputs, dtype)
