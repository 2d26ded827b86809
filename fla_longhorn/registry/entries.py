"""Longhorn beside GLA and DeltaNet, and fla's modules on the CPU: what is registered, and taken back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import fla_cpu
from fla_cpu.changes import Changes
from fla_longhorn.modules.direct import find_function

# fla's package -> (our module that stands in it as `longhorn`, the names it gains)
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

CHANGES = Changes()


def register() -> None:
    """Register everything; a second call changes nothing. Starts no kernel and touches no GPU."""
    if CHANGES:
        return
    try:
        register_names()
        register_auto_classes()
        register_served_classes()
        fla_cpu.register(CHANGES)
        register_flash_attention()
        register_attn_mode()
        register_weight_decay()
        if getattr(sys.modules.get('fla_longhorn_vllm'), 'registered', False):
            # vLLM must refuse swapped families, which it may come to by remote code
            importlib.import_module('fla_longhorn.contrib.vllm.config')
        find_function.cache_clear()
    except BaseException:
        CHANGES.revert()
        raise


def unregister() -> None:
    """Leave fla and transformers as they were before :func:`register`, which works again afterwards.

    What was built keeps its classes. `fla_longhorn`'s own ops, layer and models stay importable; on the CPU the layer and the
    models need fla's modules there, so they run after another `register()`.

    Raises:
        RuntimeError: something that was registered has been replaced by others since; nothing is changed then.
    """
    CHANGES.revert()
    find_function.cache_clear()


def register_names() -> None:
    """`fla.ops.chunk_longhorn`, `fla.layers.Longhorn`, `fla.models.LonghornConfig`, `fla.ops.longhorn` and so on."""
    root = importlib.import_module('fla')
    for package_name, (module_name, names) in EXPORTS.items():
        package, module = importlib.import_module(package_name), importlib.import_module(module_name)
        with CHANGES.of_mapping('sys.modules', sys.modules):
            sys.modules[f'{package_name}.longhorn'] = module
        CHANGES.set_attribute(package, 'longhorn', module)
        for name in names:
            export(package, name, getattr(module, name))
            # as fla does for its own layers and models
            if package_name != 'fla.ops' and not name.endswith('Config'):
                export(root, name, getattr(module, name))


def export(package: ModuleType, name: str, value: Any) -> None:
    CHANGES.set_attribute(package, name, value)
    CHANGES.append(f'{package.__name__}.__all__', package.__all__, name)


def register_auto_classes() -> None:
    """Let transformers' Auto classes build a model from a config of type `longhorn`.

    The Trainer shifts the labels of `label_smoothing_factor` for classes that transformers lists by name. Swapped families
    are called as fla's are, so these stand in the list too.
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fla_longhorn import models
    from fla_longhorn.attn_mode import FAMILIES

    config = models.LonghornConfig
    with CHANGES.of_mapping('AutoConfig', CONFIG_MAPPING._extra_content):
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_name, name in AUTO_CLASSES.items():
        auto, cls = getattr(transformers, auto_name), getattr(models, name)
        with CHANGES.of_mapping(auto_name, auto._model_mapping._extra_content):
            auto.register(config, cls, exist_ok=True)
        if auto_name in LISTS:
            listed = getattr(modeling_auto, LISTS[auto_name])
            with CHANGES.of_mapping(LISTS[auto_name], listed):
                listed[config.model_type] = name
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with CHANGES.of_mapping('MODEL_FOR_CAUSAL_LM_MAPPING_NAMES', names):
        for model_type, family in FAMILIES.items():
            if family.find_block() is not None:
                swapped: Any = transformers.AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]]
                names.setdefault(model_type, swapped.__name__)


def register_served_classes() -> None:
    """The names under which `transformers serve` looks for the class of a checkpoint: attributes of the package itself."""
    import transformers
    from fla.models.modeling_utils import FLAForCausalLM

    from fla_longhorn.attn_mode import FAMILIES
    from fla_longhorn.models import LonghornForCausalLM

    modules = [importlib.import_module(family.module) for family in FAMILIES.values() if family.find_block() is not None]
    classes = [x for module in modules for x in vars(module).values() if isinstance(x, type) and issubclass(x, FLAForCausalLM)]
    for cls in (LonghornForCausalLM, *classes):
        if cls is not FLAForCausalLM and not hasattr(transformers, cls.__name__):
            CHANGES.set_attribute(transformers, cls.__name__, cls)


def register_flash_attention() -> None:
    """PyTorch's attention in the modules of fla that looked for the package `flash_attn` and did not find it."""
    from fla_cpu import flash_attention

    for name in flash_attention.MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if getattr(module, 'flash_attn_func', None) is None:
            CHANGES.set_attribute(module, 'flash_attn_func', flash_attention.flash_attn_func)
            CHANGES.set_attribute(module, 'flash_attn_varlen_func', flash_attention.flash_attn_varlen_func)


def register_attn_mode() -> None:
    """`attn_mode='longhorn'` in the configs of fla's families; a family that this fla lacks or builds otherwise is left out.

    Wrapped are `__init__` of fla's models, to check and complete the config; `__init__` of each family's block, to build
    Longhorn in place of its mixer; the two `forward` of linear_attn; logits and loss; the making of a cache; and
    `save_pretrained` of the configs, which adds a file for `trust_remote_code=True`. A config without the word gets the
    original.
    """
    from fla.models import generation_utils, modeling_utils
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from fla_longhorn.attn_mode import FAMILIES, wrap_block_init, wrap_causal_lm, wrap_forward, wrap_model_init
    from fla_longhorn.models.generation import prepare_cache_for_generation, refuse_continuous_batching
    from fla_longhorn.models.remote_code import wrap_save_pretrained
    from fla_longhorn.models.swapped import logits_and_loss

    causal_lm, generation = modeling_utils.FLAForCausalLM, generation_utils.FLAGenerationMixin
    wrap(modeling_utils.FLAPreTrainedModel, '__init__', wrap_model_init)
    wrap(modeling_utils.FLAPreTrainedModel, '_compute_logits_and_loss', wrap_forward, logits_and_loss)
    wrap(causal_lm, 'forward', wrap_causal_lm)
    wrap(generation, '_prepare_cache_for_generation', wrap_forward, prepare_cache_for_generation)
    wrap(generation, 'init_continuous_batching', wrap_forward, refuse_continuous_batching)
    for model_type, family in FAMILIES.items():
        block = family.find_block()
        if block is None:
            continue
        wrap(CONFIG_MAPPING[model_type], 'save_pretrained', wrap_save_pretrained)
        wrap(block, '__init__', wrap_block_init, family)
        for name, shared in family.forwards.items():
            owner = getattr(importlib.import_module(family.module), name)
            wrap(owner, 'forward', wrap_forward, getattr(modeling_utils, shared).forward)
        for owner in vars(importlib.import_module(family.module)).values():
            own = isinstance(owner, type) and issubclass(owner, causal_lm) and owner is not causal_lm
            if own and 'forward' in vars(owner) and owner.__name__ not in family.forwards:
                wrap(owner, 'forward', wrap_causal_lm)


def register_weight_decay() -> None:
    """Let transformers' Trainer leave `D` out of weight decay, which goes by the names of parameters alone."""
    from transformers import trainer_pt_utils

    from fla_longhorn.layers.weight_decay import wrap_get_parameter_names

    # it imports the function by name: before this, and then it has the original, or later
    trainer = 'transformers.trainer'
    if trainer in sys.modules:
        wrap(sys.modules[trainer], 'get_parameter_names', wrap_get_parameter_names)
    wrap(trainer_pt_utils, 'get_parameter_names', wrap_get_parameter_names, imported_by=(trainer,))


def wrap(
    owner: ModuleType | type, name: str, wrapper: Callable[..., Callable], *args: Any, imported_by: tuple[str, ...] = (),
) -> None:
    """Replace a function or method by `wrapper(function, *args)`."""
    function = getattr(owner, name)
    CHANGES.set_attribute(owner, name, wraps(function)(wrapper(function, *args)), imported_by)
