"""Longhorn in vLLM, which finds :func:`register` by the entry point `vllm.general_plugins`."""

MODEL = 'fla_longhorn.serving.vllm.model'
ARCHITECTURES = ('LonghornForCausalLM', 'LonghornHybridForCausalLM')


def register() -> None:
    """Make Longhorn known to vLLM, which calls this in each of its processes; a second call changes nothing.

    The module of the models is named, not imported: vLLM imports it where it builds one.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    import fla_longhorn  # noqa: F401  transformers must know the config
    from fla_longhorn.attn_mode import FAMILIES
    from fla_longhorn.serving.vllm.config import LonghornConvertor, LonghornServingConfig, SwappedConvertor

    MODEL_ARCH_CONFIG_CONVERTORS['longhorn'] = LonghornConvertor
    for model_type in FAMILIES:
        MODEL_ARCH_CONFIG_CONVERTORS.setdefault(model_type, SwappedConvertor)
    for name in ARCHITECTURES:
        # sets the length of the tokens that share a state, which a model without attention layers gets nowhere else
        MODELS_CONFIG_MAP[name] = LonghornServingConfig
        ModelRegistry.register_model(name, f'{MODEL}:{name}')
