"""The entry point `sglang.srt.plugins`.

SGLang's tables hold classes, not names, so `register` imports the package, in each process. It applies only the parts of the
patches that a served model needs, unless the environment variable or an earlier import has chosen others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

ARCHITECTURE = 'LonghornForCausalLM'
# that of `fla_longhorn.patches`, which cannot be imported before it is set
VARIABLE = 'FLA_LONGHORN_PATCH'
# transformers' AutoConfig, which reads the checkpoint's config first; fla's modules where there is no GPU
PARTS = 'names,packages'


def register() -> None:
    """Name Longhorn's config and model in SGLang's tables; a second call changes nothing."""
    from sglang.srt.configs import linear_attn_model_registry, model_config
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.utils.hf_transformers import common

    with chosen_parts():
        from fla_longhorn_serving.sglang.config import ServedConfig
        from fla_longhorn_serving.sglang.model import LonghornForCausalLM

    if ARCHITECTURE in ModelRegistry.models:
        return
    common._CONFIG_REGISTRY[ServedConfig.model_type] = ServedConfig
    ModelRegistry.models[ARCHITECTURE] = LonghornForCausalLM
    model_config.PURE_SSM_ARCHITECTURES += (ARCHITECTURE,)
    linear_attn_model_registry.register_linear_attn_model(linear_attn_model_registry.LinearAttnModelSpec(
        config_class=ServedConfig,
        backend_class_name='sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend',
        arch_names=[ARCHITECTURE],
    ))


@contextmanager
def chosen_parts() -> Iterator[None]:
    """Choose the parts for a first import in the body; what the process starts later inherits the variable as it was."""
    given = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = given or PARTS
    try:
        yield
    finally:
        if given is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = given
