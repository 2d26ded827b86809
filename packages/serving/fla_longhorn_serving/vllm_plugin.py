"""The entry point `vllm.general_plugins`.

It leaves names, not classes: what they name is imported where a Longhorn config or model is asked for.
"""

from __future__ import annotations

import importlib
import sys
import warnings

CONFIG, MODEL = 'fla_longhorn_serving.vllm.config', 'fla_longhorn_serving.vllm.model'
ARCHITECTURES = ('LonghornForCausalLM', 'LonghornHybridForCausalLM')
# whether this process has vLLM's tables with Longhorn in them
registered = False


def register() -> None:
    """Name Longhorn's config and models to vLLM; a second call changes nothing. A vLLM without such tables gets a warning."""
    global registered
    try:
        from vllm import ModelRegistry
        from vllm.transformers_utils import config, configs

        classes, model_types = configs._CLASS_TO_MODULE, config._CONFIG_REGISTRY
    except (ImportError, AttributeError) as error:
        warnings.warn(f'fla-longhorn does not know this version of vLLM, which will not serve Longhorn: {error}', stacklevel=2)
        return
    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f'{MODEL}:{name}')
    classes['LonghornConfig'] = CONFIG
    model_types['longhorn'] = 'LonghornConfig'
    registered = True
    if 'fla_longhorn' in sys.modules:
        importlib.import_module(CONFIG)
