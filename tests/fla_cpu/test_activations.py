import pytest
import torch
import torch.nn.functional as F
from fla.modules import GatedMLP
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

from tests.fla_cpu.reference import DTYPES, compare, strided, tensor

ACTIVATIONS = {
    'sigmoid': (sigmoid, torch.sigmoid),
    'logsigmoid': (logsigmoid, F.logsigmoid),
    'tempered': (lambda x: logsigmoid(x, 16.0), lambda x: F.logsigmoid(x) / 16),
    'swish': (swish, F.silu),
    'elu_p1': (ELUPlusOneFunction.apply, lambda x: F.elu(x) + 1),
}


def power_unit(x, y, power=3.0):
    safe = torch.where(x > 0, x, 1.0)
    return torch.where(x > 0, safe ** (power / (safe.sqrt() + 1)), x) * torch.sigmoid(x) * y


UNITS = {'swiglu': (swiglu, lambda x, y: F.silu(x) * y), 'powglu': (powglu, power_unit)}


def layouts(*shape, dtype):
    """A slice of wider rows, and a transposed tensor, which is dense but not contiguous."""
    yield strided(*shape, dtype=dtype)
    yield torch.randn(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape)))).detach().requires_grad_()


@pytest.mark.parametrize('name', ACTIVATIONS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_activation(name, dtype):
    function, reference = ACTIVATIONS[name]

    def contiguous(x):
        y = function(x)
        assert y.is_contiguous() and y.dtype == dtype
        return (y,)

    for x in layouts(3, 5, 14, dtype=dtype):
        compare(contiguous, lambda x: (reference(x),), {'x': x}, dtype)


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_extreme_inputs(name):
    function, reference = ACTIVATIONS[name]
    x = torch.tensor([-1e4, -90., -20., -1., 0., 1., 20., 90., 1e4], requires_grad=True)
    compare(lambda x: (function(x),), lambda x: (reference(x),), {'x': x}, torch.float32)
    assert function(x).isfinite().all()


@pytest.mark.parametrize('name', UNITS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_gated_unit(name, dtype):
    function, reference = UNITS[name]
    for x, y in zip(layouts(3, 5, 14, dtype=dtype), layouts(3, 5, 14, dtype=dtype), strict=True):
        compare(lambda x, y: (function(x, y),), lambda x, y: (reference(x, y),), {'x': x, 'y': y}, dtype)


def test_gate_of_nothing():
    x = torch.tensor([-3., 0., 1e-3, 1., 50.], requires_grad=True)
    y = torch.ones(5, requires_grad=True)
    compare(lambda x, y: (powglu(x, y, 2.0),), lambda x, y: (power_unit(x, y, 2.0),), {'x': x, 'y': y}, torch.float32)


@pytest.mark.parametrize('name', UNITS)
def test_shapes_must_agree(name):
    with pytest.raises(ValueError, match=r'\(2, 3\), \(2, 4\)'):
        UNITS[name][0](torch.ones(2, 3), torch.ones(2, 4))


@pytest.mark.parametrize('name', UNITS)
@pytest.mark.parametrize('bias', [True, False])
def test_gated_linear(name, bias):
    function = swiglu_linear if name == 'swiglu' else powglu_linear
    inputs = {
        'x': strided(2, 5, 8), 'y': strided(2, 5, 8), 'weight': tensor(6, 8), 'bias': tensor(6) if bias else None,
    }

    def reference(x, y, weight, bias):
        return (F.linear(UNITS[name][1](x, y), weight, bias),)

    compare(lambda **given: (function(*given.values()),), reference, inputs, torch.float32)


@pytest.mark.parametrize('hidden_act', ['swish', 'powlu'])
def test_gated_mlp_under_autocast(hidden_act):
    module, x = GatedMLP(8, intermediate_size=12, hidden_act=hidden_act), tensor(2, 5, 8)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.ne(0).any() and module.down_proj.weight.grad.dtype == torch.float32
