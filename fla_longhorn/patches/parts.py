"""The parts. Each is a function that records its changes, so that they can be reverted."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol

from fla_longhorn.layers.weight_decay import NoWeightDecay
from fla_longhorn.ops import backends
from fla_longhorn.ops.backends import Loops
from fla_longhorn.patches.changes import Changes

# the entry points of the packages beside the plugin
PACKAGES = 'fla_longhorn.packages'
# fla's package -> (our module that becomes its `longhorn`, names that are added to it)
EXPORTS = {
    'fla.ops': ('fla_longhorn.ops', ('chunk_longhorn', 'fused_recurrent_longhorn')),
    'fla.layers': ('fla_longhorn.layers.longhorn', ('Longhorn',)),
    'fla.models': ('fla_longhorn.models.longhorn', (
        'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
        'LonghornModel',
    )),
}
# transformers' Auto class -> (our class, the list of class names that the Trainer, pipelines and model cards look in)
AUTO_CLASSES = {
    'AutoModel': ('LonghornModel', None),
    'AutoModelForCausalLM': ('LonghornForCausalLM', 'MODEL_FOR_CAUSAL_LM_MAPPING_NAMES'),
    'AutoModelForSequenceClassification': (
        'LonghornForSequenceClassification', 'MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES',
    ),
    'AutoModelForTokenClassification': ('LonghornForTokenClassification', 'MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES'),
}


def register_names(changes: Changes) -> None:
    """`fla.ops.chunk_longhorn`, `fla.layers.Longhorn`, `fla.models.LonghornConfig`, `fla.ops.longhorn` and so on."""
    root = importlib.import_module('fla')
    for package_name, (module_name, names) in EXPORTS.items():
        package, module = importlib.import_module(package_name), importlib.import_module(module_name)
        with changes.of_mapping('sys.modules', sys.modules):
            sys.modules[f'{package_name}.longhorn'] = module
        changes.set_attribute(package, 'longhorn', module)
        for name in names:
            # fla itself has the layers and models, too
            for owner in (package,) if package_name == 'fla.ops' or name.endswith('Config') else (package, root):
                changes.set_attribute(owner, name, getattr(module, name))
                changes.append(f'{owner.__name__}.__all__', owner.__all__, name)
    register_auto_classes(changes)


def register_auto_classes(changes: Changes) -> None:
    """Register the models with transformers' Auto classes."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fla_longhorn import models

    config = models.LonghornConfig
    with changes.of_mapping('AutoConfig', CONFIG_MAPPING._extra_content):
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_name, (name, list_name) in AUTO_CLASSES.items():
        auto, cls = getattr(transformers, auto_name), getattr(models, name)
        with changes.of_mapping(auto_name, auto._model_mapping._extra_content):
            auto.register(config, cls, exist_ok=True)
        if list_name is not None:
            listed = getattr(modeling_auto, list_name)
            with changes.of_mapping(list_name, listed):
                listed[config.model_type] = name


def register_attn_mode(changes: Changes) -> None:
    """Support `attn_mode='longhorn'` in fla's configs, for the families that the installed fla has.

    Every wrapper calls the original method unless the config has `attn_mode='longhorn'`.
    """
    from fla.layers.attn import Attention
    from fla.models import generation_utils, modeling_utils
    from fla.modules.mlp import GatedMLP
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fla_longhorn.attn_mode import FAMILIES, swap
    from fla_longhorn.attn_mode.swap import wrap_causal_lm, wrap_forward
    from fla_longhorn.models.base import prepare_cache_for_generation, refuse_continuous_batching, sample
    from fla_longhorn.models.causal_lm import compute_logits_and_loss

    wrap = partial(wrap_attribute, changes)
    causal_lm, generation = modeling_utils.FLAForCausalLM, generation_utils.FLAGenerationMixin
    wrap(modeling_utils.FLAPreTrainedModel, '__init__', swap.wrap_model_init)
    wrap(modeling_utils.FLAPreTrainedModel, '_compute_logits_and_loss', wrap_forward, compute_logits_and_loss)
    wrap(causal_lm, 'forward', wrap_causal_lm)
    wrap(generation, '_prepare_cache_for_generation', wrap_forward, prepare_cache_for_generation)
    wrap(generation, '_sample', wrap_forward, sample)
    wrap(generation, 'prepare_inputs_for_generation', swap.wrap_prepare_inputs)
    wrap(generation, 'init_continuous_batching', wrap_forward, refuse_continuous_batching)
    families = {name: family for name, family in FAMILIES.items() if family.find_block() is not None}
    for native in {Attention, GatedMLP, *(family.find_native() for family in families.values())}:
        wrap(native, '__init__', swap.wrap_module_init)
    for model_type, family in families.items():
        config: Any = CONFIG_MAPPING[model_type]
        # the Trainer's predictions leave it out; transformers calls it `cache` from 5.24 on
        changes.set_attribute(config, 'keys_to_ignore_at_inference', [*config.keys_to_ignore_at_inference, 'cache'])
        wrap(family.find_block(), '__init__', swap.wrap_block_init, family)
        for name, shared in family.forwards.items():
            owner = getattr(importlib.import_module(family.module), name)
            wrap(owner, 'forward', wrap_forward, getattr(modeling_utils, shared).forward)
        for owner in vars(importlib.import_module(family.module)).values():
            own = isinstance(owner, type) and issubclass(owner, causal_lm) and owner is not causal_lm
            if own and 'forward' in vars(owner) and owner.__name__ not in family.forwards:
                wrap(owner, 'forward', wrap_causal_lm)


class Register(Protocol):
    """What an entry point of the group :data:`PACKAGES` names: the only door for packages beside the plugin."""

    def __call__(self, changes: Changes) -> Loops | None:
        """Change fla, transformers and others, record that, and return loops for the CPU, or None."""


def register_packages(changes: Changes) -> None:
    """What installed packages beside the plugin bring.

    Raises:
        ValueError: two of them bring loops for the CPU.
    """
    for entry in entry_points(group=PACKAGES):
        register: Register = entry.load()
        loops = register(changes)
        if loops is not None and backends.loops is not None:
            raise ValueError(f'one package may bring loops for the CPU, got two: uninstall {entry.value} or the other one')
        if loops is not None:
            changes.set_attribute(backends, 'loops', loops)


def register_trainer(changes: Changes) -> None:
    """Let transformers' Trainer, which selects parameters by name, exclude `D` and a gate's parameters from weight decay."""
    from transformers import trainer_pt_utils

    # the Trainer imports the function by name, and may have done so already
    trainer, name = 'transformers.trainer', 'get_parameter_names'
    if trainer in sys.modules:
        wrap_attribute(changes, sys.modules[trainer], name, wrap_get_parameter_names)
    wrap_attribute(changes, trainer_pt_utils, name, wrap_get_parameter_names, imported_by=(trainer,))


def wrap_get_parameter_names(get_parameter_names: Callable) -> Callable:
    """Wrap transformers' recursion over submodules, which returns the names of the parameters to decay."""
    def run(model: Any, *args, **kwargs) -> list[str]:
        names = get_parameter_names(model, *args, **kwargs)
        return [name for name in names if name not in model.no_weight_decay] if isinstance(model, NoWeightDecay) else names

    return run


def wrap_attribute(
    changes: Changes, owner: ModuleType | type, name: str, wrapper: Callable[..., Callable], *args: Any,
    imported_by: tuple[str, ...] = (),
) -> None:
    """Replace a function or method with `wrapper(function, *args)`."""
    function = getattr(owner, name)
    changes.set_attribute(owner, name, wraps(function)(wrapper(function, *args)), imported_by)


# they are applied in this order
PARTS: dict[str, Callable[[Changes], Any]] = {
    'names': register_names,
    'attn_mode': register_attn_mode,
    'packages': register_packages,
    'trainer': register_trainer,
}
