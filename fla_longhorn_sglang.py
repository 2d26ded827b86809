"""The entry point `sglang.srt.plugins`, which SGLang calls in each of its processes, whatever it serves.

"""

# At the top level, to be importable without fla: a module of `fla_longhorn` imports fla and applies the patches as soon as
# SGLang loads the entry point. `register` does so too, but only when it is called: SGLang's tables hold classes, not names.
from __future__ import annotations

ARCHITECTURE = 'LonghornForCausalLM'


def register() -> None:
    """Name Longhorn's config and model in SGLang's tables; a second call changes nothing."""
    from sglang.srt.configs import linear_attn_model_registry, model_config
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.utils.hf_transformers import common

    from fla_longhorn.contrib.sglang.config import ServedConfig
    from fla_longhorn.contrib.sglang.model import LonghornForCausalLM

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
