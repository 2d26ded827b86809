"""Which modules' weights are used without a call: those that nothing was put in or around."""

import pytest
import torch
import torch.nn as nn

from fla_longhorn.modules import ShortConvolution
from fla_longhorn.modules.bare import is_bare


class Weight(torch.Tensor):
    """As quantisation and DTensor have them."""


def set_weight(module: nn.Module) -> None:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Weight))


CHANGES = {
    'forward hook': lambda module: module.register_forward_hook(lambda *args: None),
    'forward pre-hook': lambda module: module.register_forward_pre_hook(lambda *args: None),
    'backward hook': lambda module: module.register_full_backward_hook(lambda *args: None),
    'backward pre-hook': lambda module: module.register_full_backward_pre_hook(lambda *args: None),
    'forward replaced': lambda module: setattr(module, 'forward', type(module).forward.__get__(module)),
    'class replaced': lambda module: setattr(module, '__class__', type('Adapter', (type(module),), {})),
    'class of the weight': set_weight,
    'weights elsewhere': lambda module: module.to('meta'),
}


@pytest.mark.parametrize('make', [lambda: nn.Linear(6, 10), lambda: ShortConvolution(6, 4)], ids=['linear', 'convolution'])
@pytest.mark.parametrize('change', CHANGES)
def test_what_is_put_in_or_around_a_module_is_seen(make, change, device):
    module = make().to(device)
    # with an index, as inputs have it
    place = module.weight.device
    assert is_bare(module, place)
    CHANGES[change](module)
    assert not is_bare(module, place)


def test_a_hook_of_all_modules_is_seen(device):
    module = nn.Linear(6, 10, device=device)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not is_bare(module, module.weight.device)
    finally:
        handle.remove()
