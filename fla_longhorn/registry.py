"""The one place that touches fla and transformers: Longhorn beside GLA and DeltaNet, and fla's modules on the CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import wraps

# fla's package -> (our module that stands in it as `longhorn`, the names it gains)
EXPORTS = {
    'fla.ops': ('fla_longhorn.ops', ('chunk_longhorn', 'fused_recurrent_longhorn')),
    'fla.layers': ('fla_longhorn.layers.longhorn', ('Longhorn',)),
    'fla.models': ('fla_longhorn.models.longhorn', ('LonghornConfig', 'LonghornForCausalLM', 'LonghornModel')),
}
CPU_MODULES = ('activations', 'convolution', 'loss_modules', 'losses', 'norms', 'rotary', 'rwkv')


def register() -> None:
    """Register everything; a second call changes nothing. Starts no kernel and touches no GPU."""
    register_names()
    register_auto_classes()
    register_cpu_modules()
    register_flash_attention()
    register_attn_mode()
    register_weight_decay()


def register_names() -> None:
    """`fla.ops.chunk_longhorn`, `fla.layers.Longhorn`, `fla.models.LonghornConfig`, `fla.ops.longhorn` and so on."""
    root = importlib.import_module('fla')
    for package_name, (module_name, names) in EXPORTS.items():
        package, module = importlib.import_module(package_name), importlib.import_module(module_name)
        sys.modules[f'{package_name}.longhorn'] = module
        package.longhorn = module
        for name in names:
            _export(package, name, getattr(module, name))
            # as fla does for its own layers and models
            if package_name != 'fla.ops' and not name.endswith('Config'):
                _export(root, name, getattr(module, name))


def register_auto_classes() -> None:
    """Let transformers' Auto classes build a model from a config of type `longhorn`."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from fla_longhorn.models import LonghornConfig, LonghornForCausalLM, LonghornModel

    AutoConfig.register(LonghornConfig.model_type, LonghornConfig, exist_ok=True)
    AutoModel.register(LonghornConfig, LonghornModel, exist_ok=True)
    AutoModelForCausalLM.register(LonghornConfig, LonghornForCausalLM, exist_ok=True)


def register_cpu_modules() -> None:
    """Norms, convolution, losses, activations, rotary embedding and what RWKV needs of fla, for tensors on the CPU."""
    for name in CPU_MODULES:
        importlib.import_module(f'fla_longhorn.cpu.{name}')


def register_flash_attention() -> None:
    """PyTorch's attention in the modules of fla that looked for the package `flash_attn` and did not find it."""
    from fla_longhorn.cpu import flash_attention

    for name in flash_attention.MODULES:
        module = _import(name)
        if module is not None and getattr(module, 'flash_attn_func', None) is None:
            module.flash_attn_func = flash_attention.flash_attn_func
            module.flash_attn_varlen_func = flash_attention.flash_attn_varlen_func


def register_attn_mode() -> None:
    """`attn_mode='longhorn'` in the configs of fla's families; a family that this fla lacks or builds otherwise is left out.

    Wrapped are `__init__` of fla's models, to check and complete the config; `__init__` of each family's block, to build
    Longhorn in place of its mixer; and the two `forward` of linear_attn. A config without the word gets the original.
    """
    from fla.models import modeling_utils

    from fla_longhorn import attn_mode

    _wrap(modeling_utils.FLAPreTrainedModel, '__init__', attn_mode.wrap_model_init)
    for family in attn_mode.FAMILIES.values():
        block = family.find_block()
        if block is None:
            continue
        _wrap(block, '__init__', lambda init, family=family: attn_mode.wrap_block_init(init, family))
        for name, shared_name in family.forwards.items():
            owner, shared = getattr(importlib.import_module(family.module), name), getattr(modeling_utils, shared_name).forward
            _wrap(owner, 'forward', lambda own, shared=shared: attn_mode.wrap_forward(own, shared))


def register_weight_decay() -> None:
    """Let transformers' Trainer leave `D` out of weight decay, which goes by the names of parameters alone."""
    from fla_longhorn.layers.weight_decay import wrap_get_parameter_names

    _wrap(_import('transformers.trainer_pt_utils'), 'get_parameter_names', wrap_get_parameter_names)
    if 'transformers.trainer' in sys.modules:
        # imported before: it has a name of its own for the function
        _wrap(sys.modules['transformers.trainer'], 'get_parameter_names', wrap_get_parameter_names)


def _import(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _wrap(owner: type, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace a method by `wrapper(method)`, once."""
    method = getattr(owner, name)
    if not getattr(method, 'of_longhorn', False):
        wrapped = wraps(method)(wrapper(method))
        wrapped.of_longhorn = True
        setattr(owner, name, wrapped)


def _export(package, name: str, value) -> None:
    setattr(package, name, value)
    if name not in package.__all__:
        package.__all__.append(name)
