import pytest
import torch
import torch.nn.functional as F
from fla.modules.activations import (
    ELUPlusOneFunction,
    logsigmoid,
    powglu,
    powglu_linear,
    sigmoid,
    swiglu,
    swiglu_linear,
    swish,
)

from tests.reference import DTYPES, compare, strided, tensor


def power_unit(x, y, power=3.0):
    safe = torch.where(x > 0, x, 1.0)
    return torch.where(x > 0, safe ** (power / (safe.sqrt() + 1)), x) * torch.sigmoid(x) * y


FUNCTIONS = {
    'sigmoid': (sigmoid, torch.sigmoid),
    'logsigmoid': (logsigmoid, F.logsigmoid),
    'tempered': (lambda x: logsigmoid(x, 16.0), lambda x: F.logsigmoid(x) / 16),
    'swish': (swish, F.silu),
    'elu_p1': (ELUPlusOneFunction.apply, lambda x: F.elu(x) + 1),
    'swiglu': (swiglu, lambda x, y: F.silu(x) * y),
    'powglu': (powglu, power_unit),
    'powglu 2': (lambda x, y: powglu(x, y, 2.0), lambda x, y: power_unit(x, y, 2.0)),
}
UNITS = {'swiglu': swiglu_linear, 'powglu': powglu_linear}


def compare_function(name, dtype, *inputs):
    function, reference = FUNCTIONS[name]

    def contiguous(*given):
        y = function(*given)
        assert y.is_contiguous() and y.dtype == dtype and y.isfinite().all()
        return (y,)

    # gated units take a second input, y
    named = dict(zip('xy' if 'glu' in name else 'x', inputs, strict=False))
    compare(lambda **x: contiguous(*x.values()), lambda **x: (reference(*x.values()),), named, dtype)


@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_function(name, dtype):
    """Of slices of wider rows, and of transposed tensors, which are dense but not contiguous."""
    compare_function(name, dtype, *(strided(3, 5, 14, dtype=dtype) for _ in range(2)))
    compare_function(name, dtype, *(torch.randn(14, 5, 3, dtype=dtype).permute(2, 1, 0).requires_grad_() for _ in range(2)))


@pytest.mark.parametrize('name', FUNCTIONS)
def test_extreme_inputs(name):
    x = torch.tensor([-1e4, -90., -20., -1., 0., 1e-3, 1., 20., 90., 1e4], requires_grad=True)
    compare_function(name, torch.float32, x, torch.ones(10, requires_grad=True))


@pytest.mark.parametrize('name', UNITS)
@pytest.mark.parametrize('bias', [True, False])
def test_gated_linear(name, bias):
    inputs = {
        'x': strided(2, 5, 8), 'y': strided(2, 5, 8), 'weight': tensor(6, 8), 'bias': tensor(6) if bias else None,
    }

    def reference(x, y, weight, bias):
        return (F.linear(FUNCTIONS[name][1](x, y), weight, bias),)

    compare(lambda **given: (UNITS[name](*given.values()),), reference, inputs, torch.float32)
