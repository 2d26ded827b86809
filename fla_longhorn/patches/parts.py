"""The parts of what importing changes. Each is a function that notes its changes, to be reverted exactly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import fla_cpu
from fla_cpu.changes import Changes

# fla's package -> (our module that it holds as `longhorn`, the names it gains)
EXPORTS = {
    'fla.ops': ('fla_longhorn.ops', ('chunk_longhorn', 'fused_recurrent_longhorn')),
    'fla.layers': ('fla_longhorn.layers.longhorn', ('Longhorn',)),
    'fla.models': ('fla_longhorn.models.longhorn', (
        'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
        'LonghornModel',
    )),
}
# transformers' Auto class -> ours
AUTO_CLASSES = {
    'AutoModel': 'LonghornModel',
    'AutoModelForCausalLM': 'LonghornForCausalLM',
    'AutoModelForSequenceClassification': 'LonghornForSequenceClassification',
    'AutoModelForTokenClassification': 'LonghornForTokenClassification',
}
# and the lists of class names by which the Trainer, pipelines and model cards decide
LISTS = {
    'AutoModelForCausalLM': 'MODEL_FOR_CAUSAL_LM_MAPPING_NAMES',
    'AutoModelForSequenceClassification': 'MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES',
    'AutoModelForTokenClassification': 'MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES',
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
            export(changes, package, name, getattr(module, name))
            # as fla does for its own layers and models
            if package_name != 'fla.ops' and not name.endswith('Config'):
                export(changes, root, name, getattr(module, name))
    register_auto_classes(changes)


def export(changes: Changes, package: ModuleType, name: str, value: Any) -> None:
    changes.set_attribute(package, name, value)
    changes.append(f'{package.__name__}.__all__', package.__all__, name)


def register_auto_classes(changes: Changes) -> None:
    """Let transformers' Auto classes build a model from a config of type `longhorn`.

    The Trainer shifts the labels of `label_smoothing_factor` for classes that transformers lists by name.
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fla_longhorn import models

    config = models.LonghornConfig
    with changes.of_mapping('AutoConfig', CONFIG_MAPPING._extra_content):
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_name, name in AUTO_CLASSES.items():
        auto, cls = getattr(transformers, auto_name), getattr(models, name)
        with changes.of_mapping(auto_name, auto._model_mapping._extra_content):
            auto.register(config, cls, exist_ok=True)
        if auto_name in LISTS:
            listed = getattr(modeling_auto, LISTS[auto_name])
            with changes.of_mapping(LISTS[auto_name], listed):
                listed[config.model_type] = name


def register_served_classes(changes: Changes) -> None:
    """The names under which `transformers serve` looks for the class of a checkpoint: attributes of the package itself."""
    import transformers
    from fla.models.modeling_utils import FLAForCausalLM

    from fla_longhorn.attn_mode import FAMILIES
    from fla_longhorn.models import LonghornForCausalLM

    modules = [importlib.import_module(family.module) for family in FAMILIES.values() if family.find_block() is not None]
    classes = [x for module in modules for x in vars(module).values() if isinstance(x, type) and issubclass(x, FLAForCausalLM)]
    for cls in (LonghornForCausalLM, *classes):
        if cls is not FLAForCausalLM and not hasattr(transformers, cls.__name__):
            changes.set_attribute(transformers, cls.__name__, cls)


def register_flash_attention(changes: Changes) -> None:
    """PyTorch's attention in the modules of fla that looked for the package `flash_attn` and did not find it.

    Longhorn's models and swapped families have it without this part (:mod:`fla_longhorn.modules.attention`).
    """
    from fla_cpu import flash_attention

    for name in flash_attention.MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if getattr(module, 'flash_attn_func', None) is None:
            changes.set_attribute(module, 'flash_attn_func', flash_attention.flash_attn_func)
            changes.set_attribute(module, 'flash_attn_varlen_func', flash_attention.flash_attn_varlen_func)


def register_attn_mode(changes: Changes) -> None:
    """`attn_mode='longhorn'` in the configs of fla's families; a family that this fla lacks or names otherwise is left out.

    Wrapped are `__init__` of fla's models, to check and complete the config; `__init__` of each family's block, and of the
    modules in it that Longhorn's take the place of; the two `forward` of linear_attn; logits and loss; the making of a cache;
    and `save_pretrained` of the configs, which adds a file for `trust_remote_code=True`. A config without the word gets the
    original.
    """
    from fla.layers.attn import Attention
    from fla.models import generation_utils, modeling_utils
    from fla.modules.mlp import GatedMLP
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fla_longhorn.attn_mode import (
        FAMILIES,
        wrap_block_init,
        wrap_causal_lm,
        wrap_forward,
        wrap_model_init,
        wrap_module_init,
    )
    from fla_longhorn.models.causal_lm import compute_logits_and_loss
    from fla_longhorn.models.generation import prepare_cache_for_generation, refuse_continuous_batching
    from fla_longhorn.models.remote_code import wrap_save_pretrained

    wrap = partial(wrap_attribute, changes)
    causal_lm, generation = modeling_utils.FLAForCausalLM, generation_utils.FLAGenerationMixin
    wrap(modeling_utils.FLAPreTrainedModel, '__init__', wrap_model_init)
    wrap(modeling_utils.FLAPreTrainedModel, '_compute_logits_and_loss', wrap_forward, compute_logits_and_loss)
    wrap(causal_lm, 'forward', wrap_causal_lm)
    wrap(generation, '_prepare_cache_for_generation', wrap_forward, prepare_cache_for_generation)
    wrap(generation, 'init_continuous_batching', wrap_forward, refuse_continuous_batching)
    families = {model_type: family for model_type, family in FAMILIES.items() if family.find_block() is not None}
    for native in {Attention, GatedMLP, *(family.find_native() for family in families.values())}:
        wrap(native, '__init__', wrap_module_init)
    for model_type, family in families.items():
        wrap(CONFIG_MAPPING[model_type], 'save_pretrained', wrap_save_pretrained)
        wrap(family.find_block(), '__init__', wrap_block_init, family)
        for name, shared in family.forwards.items():
            owner = getattr(importlib.import_module(family.module), name)
            wrap(owner, 'forward', wrap_forward, getattr(modeling_utils, shared).forward)
        for owner in vars(importlib.import_module(family.module)).values():
            own = isinstance(owner, type) and issubclass(owner, causal_lm) and owner is not causal_lm
            if own and 'forward' in vars(owner) and owner.__name__ not in family.forwards:
                wrap(owner, 'forward', wrap_causal_lm)
    if getattr(sys.modules.get('fla_longhorn_vllm'), 'registered', False):
        # vLLM must refuse swapped families, which it may come to by remote code
        importlib.import_module('fla_longhorn.contrib.vllm.config')


def register_trainer(changes: Changes) -> None:
    """Let transformers' Trainer leave `D` out of weight decay, which goes by the names of parameters alone."""
    from transformers import trainer_pt_utils

    from fla_longhorn.layers.weight_decay import wrap_get_parameter_names

    # it imports the function by name: before this, and then it has the original, or later
    trainer, name = 'transformers.trainer', 'get_parameter_names'
    if trainer in sys.modules:
        wrap_attribute(changes, sys.modules[trainer], name, wrap_get_parameter_names)
    wrap_attribute(changes, trainer_pt_utils, name, wrap_get_parameter_names, imported_by=(trainer,))


def wrap_attribute(
    changes: Changes,
    owner: ModuleType | type,
    name: str,
    wrapper: Callable[..., Callable],
    *args: Any,
    imported_by: tuple[str, ...] = (),
) -> None:
    """Replace a function or method by `wrapper(function, *args)`."""
    function = getattr(owner, name)
    changes.set_attribute(owner, name, wraps(function)(wrapper(function, *args)), imported_by)


# in the order in which they are applied
PARTS: dict[str, Callable[[Changes], Any]] = {
    'names': register_names,
    'attn_mode': register_attn_mode,
    'cpu': fla_cpu.register,
    'trainer': register_trainer,
    'served': register_served_classes,
    'flash_attn': register_flash_attention,
}
