"""The one place that touches fla and transformers: Longhorn beside GLA and DeltaNet, and fla's modules on the CPU."""

from __future__ import annotations

import importlib
import sys

# fla's package -> (our module that stands in it as `longhorn`, the names it gains)
EXPORTS = {
    'fla.ops': ('fla_longhorn.ops', ('chunk_longhorn', 'fused_recurrent_longhorn')),
    'fla.layers': ('fla_longhorn.layers.longhorn', ('Longhorn',)),
    'fla.models': ('fla_longhorn.models.longhorn', ('LonghornConfig', 'LonghornForCausalLM', 'LonghornModel')),
}
CPU_MODULES = ('activations', 'convolution', 'loss_modules', 'losses', 'norms', 'rotary')


def register() -> None:
    """Register everything; a second call changes nothing. Starts no kernel and touches no GPU."""
    register_names()
    register_auto_classes()
    register_cpu_modules()


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
    """Norms, convolution, losses, activations and rotary embedding of fla for tensors on the CPU."""
    for name in CPU_MODULES:
        importlib.import_module(f'fla_longhorn.backends.{name}')


def _export(package, name: str, value) -> None:
    setattr(package, name, value)
    if name not in package.__all__:
        package.__all__.append(name)
