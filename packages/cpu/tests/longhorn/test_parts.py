"""Each part of a layer replaced, wrapped, hooked, parametrised, of another dtype, with a bias or without: decoding sees it."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn as nn
from fla.models.utils import Cache
from torch.nn.utils.parametrize import register_parametrization

from fla_longhorn import Longhorn


def make() -> Longhorn:
    torch.manual_seed(0)
    layer = Longhorn(hidden_size=24, layer_idx=0, gate='head', num_heads=4, k_norm='l2').eval()
    for x in layer.parameters():
        nn.init.normal_(x, std=x.shape[-1]**-0.5 if x.dim() > 1 else 1)
    return layer.requires_grad_(False)


LAYER = make()
MODULES = [name for name, _ in LAYER.named_modules() if name]
PARAMETERS = [name for name, _ in LAYER.named_parameters()]


def doubled(output):
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str):
        return super().__getattr__(name) if name == 'module' else getattr(super().__getattr__('module'), name)

    def forward(self, *args, **kwargs):
        return doubled(self.module(*args, **kwargs))


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def of_subclass(module: nn.Module) -> nn.Module:
    cls = type(module)

    def forward(self, *args, **kwargs):
        return doubled(cls.forward(self, *args, **kwargs))

    module.__class__ = type(cls.__name__, (cls,), {'forward': forward})
    return module


def hooked(module: nn.Module, register: str, hook: Callable) -> nn.Module:
    getattr(module, register)(hook)
    return module


def with_other_forward(module: nn.Module) -> nn.Module:
    forward = module.forward
    module.forward = lambda *args, **kwargs: doubled(forward(*args, **kwargs))
    return module


def with_other_bias(module: nn.Module) -> nn.Module:
    """One where there was none."""
    if 'bias' in module._parameters:
        size = len(module.weight)
        module.bias = None if module.bias is not None else nn.Parameter(torch.ones(size), requires_grad=False)
    return module


# what becomes of a module
OF_MODULES = {
    'wrapped': Wrapped,
    'replaced by another class': lambda module: nn.Tanh(),
    'replaced by nothing': lambda module: nn.Identity(),
    'of a subclass': of_subclass,
    'with a hook': lambda module: hooked(module, 'register_forward_hook', lambda module, args, output: doubled(output)),
    'with a hook before': lambda module: hooked(
        module, 'register_forward_pre_hook',
        lambda module, args, kwargs: (tuple(2 * x for x in args), {n: 2 * x if n == 'x' else x for n, x in kwargs.items()}),
    ),
    'with another forward': with_other_forward,
    'with a bias or without': with_other_bias,
    'of bfloat16': lambda module: module.bfloat16(),
    'of float64': lambda module: module.double(),
}


def replace(owner: nn.Module, name: str, value) -> None:
    delattr(owner, name)
    setattr(owner, name, value)


# what becomes of a parameter
OF_PARAMETERS = {
    'replaced': lambda owner, name, x: setattr(owner, name, nn.Parameter(2 * x, requires_grad=False)),
    'replaced by a tensor': lambda owner, name, x: replace(owner, name, 2 * x),
    'parametrised': lambda owner, name, x: register_parametrization(owner, name, Double()),
    'of bfloat16': lambda owner, name, x: setattr(owner, name, nn.Parameter(x.bfloat16(), requires_grad=False)),
    'by columns': lambda owner, name, x: setattr(owner, name, nn.Parameter(2 * x.mT.contiguous().mT, requires_grad=False))
    if x.dim() > 1 else None,
    'absent': lambda owner, name, x: setattr(owner, name, None),
}


def change_module(layer: Longhorn, name: str, change: str) -> None:
    owner, _, last = name.rpartition('.')
    setattr(layer.get_submodule(owner), last, OF_MODULES[change](layer.get_submodule(name)))


def change_parameter(layer: Longhorn, name: str, change: str) -> None:
    owner, _, last = name.rpartition('.')
    OF_PARAMETERS[change](layer.get_submodule(owner), last, layer.get_parameter(name))


def outputs(function: Callable, *args) -> torch.Tensor | str:
    try:
        return function(*args)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return type(error).__name__


def whole(layer: Longhorn, h: torch.Tensor) -> torch.Tensor:
    return layer(h)[0]


def decode(layer: Longhorn, h: torch.Tensor) -> torch.Tensor:
    cache = Cache()
    return torch.cat([layer(h[:, t:t + 1], past_key_values=cache, use_cache=True)[0] for t in range(h.shape[1])], 1)


def assert_decoding_sees(change: Callable[[Longhorn], None]) -> None:
    layer, h = deepcopy(LAYER), torch.randn(2, 6, 24)
    change(layer)
    expected, got = outputs(whole, layer, h), outputs(decode, layer, h)
    if isinstance(expected, str) or isinstance(got, str):
        assert isinstance(expected, str) and isinstance(got, str)
    else:
        tolerance = 1e-6 if all(x.dtype is torch.float32 for x in layer.parameters()) else 1e-2
        assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize('change', OF_MODULES)
@pytest.mark.parametrize('name', MODULES)
@torch.no_grad()
def test_modules(name, change):
    assert_decoding_sees(lambda layer: change_module(layer, name, change))


@pytest.mark.parametrize('change', OF_PARAMETERS)
@pytest.mark.parametrize('name', PARAMETERS)
@torch.no_grad()
def test_parameters(name, change):
    assert_decoding_sees(lambda layer: change_parameter(layer, name, change))


@pytest.mark.parametrize('change', [
    lambda layer: setattr(layer.conv1d, 'activation', None),
    lambda layer: setattr(layer, 'project', lambda x, values=None: Longhorn.project(layer, 2 * x, values)),
    lambda layer: setattr(layer, 'v_proj', nn.Linear(48, 48, bias=False)),
    lambda layer: layer.bfloat16(), lambda layer: layer.half(),
], ids=['activation', 'method', 'values', 'bfloat16', 'float16'])
@torch.no_grad()
def test_layers(change):
    layer, h = deepcopy(LAYER), torch.randn(2, 6, 24)
    change(layer)
    h = h.to(layer.D.dtype)
    expected, got = whole(layer, h), decode(layer, h)
    tolerance = 1e-6 if h.dtype is torch.float32 else 1e-2
    assert (got - expected).norm() <= tolerance * expected.norm()
