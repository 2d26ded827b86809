"""Longhorn in vLLM, SGLang and `transformers serve`.

The first two find it by entry points, called in each of their processes, whatever it serves. Importing this package imports
neither server, nor fla and transformers, which `fla_longhorn` patches.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

# the layer's options that are implemented here; `recompute` is of training, `norm_eps` without effect
KNOWN = (
    'hidden_size', 'state_size', 'expand', 'num_heads', 'conv_size', 'conv_bias', 'beta_rank', 'use_bias', 'exact',
    'scalar_beta', 'k_norm', 'tie_qk', 'value_proj', 'recompute', 'norm_eps', 'allow_neg_eigval', 'gate',
)


def register(changes: Any) -> None:
    """Called by `import fla_longhorn`: tell a vLLM that has loaded the plugin what it must know of configs.

    It may load swapped families by remote code.
    """
    register_served_classes(changes)
    if getattr(sys.modules.get('fla_longhorn_serving.vllm_plugin'), 'registered', False):
        importlib.import_module('fla_longhorn_serving.vllm.config')


def register_served_classes(changes: Any) -> None:
    """Add the classes to the package `transformers`, where `transformers serve` looks for them."""
    import transformers
    from fla.models.modeling_utils import FLAForCausalLM

    from fla_longhorn.attn_mode import FAMILIES
    from fla_longhorn.models import LonghornForCausalLM

    modules = [importlib.import_module(family.module) for family in FAMILIES.values() if family.find_block() is not None]
    classes = [x for module in modules for x in vars(module).values() if isinstance(x, type) and issubclass(x, FLAForCausalLM)]
    for cls in (LonghornForCausalLM, *classes):
        if cls is not FLAForCausalLM and not hasattr(transformers, cls.__name__):
            changes.set_attribute(transformers, cls.__name__, cls)


def check_known(host: str, config: Any) -> None:
    """Raise for an option of the layer that is set and not in :data:`KNOWN`."""
    from fla_longhorn.hosts import MIXER_OPTIONS
    from fla_longhorn.layers import Longhorn

    for name, parameter in inspect.signature(Longhorn).parameters.items():
        if name in MIXER_OPTIONS and name not in KNOWN and getattr(config, name) != parameter.default:
            raise ValueError(
                f'{name} must be {parameter.default!r} in {host}, which has no such option, got {getattr(config, name)!r}'
            )
