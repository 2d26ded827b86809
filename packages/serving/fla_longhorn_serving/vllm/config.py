"""What vLLM has to know of a Longhorn config before it builds the model; importing this module tells it.

vLLM imports it for the first config of type `longhorn`, and `fla_longhorn.patches` wherever vLLM has loaded the plugin.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS, ModelArchConfigConvertorBase

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.hosts import is_swapped
from fla_longhorn.models import LonghornConfig
from fla_longhorn_serving import check_known
from fla_longhorn_serving.vllm_plugin import ARCHITECTURES

# endings of the classes that a checkpoint may name; vLLM derives the others from the first
SUFFIXES = ('ForCausalLM', 'ForSequenceClassification', 'ForTokenClassification', 'Model')
# tokens between two states that prefix caching keeps
BLOCK_SIZE = 128


class LonghornConvertor(ModelArchConfigConvertorBase):
    """Names the class of a model, with attention layers or without, and counts its attention heads.

    vLLM plans its pages by these numbers, and takes the attention layers to be alike in them.
    """

    def __init__(self, hf_config: LonghornConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        check_known('vLLM', hf_config)
        # vLLM's loader reads the architectures of the config
        name = (hf_config.architectures or [''])[0]
        suffix = next(filter(name.endswith, SUFFIXES), SUFFIXES[0])
        hf_config.architectures = [('Longhorn' if hf_config.attn is None else 'LonghornHybrid') + suffix]

    def get_total_num_attention_heads(self) -> int:
        return self._of_attention('num_heads')

    def get_total_num_kv_heads(self) -> int:
        return self._of_attention('num_kv_heads')

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        # a recurrent state has no positions
        return (float('inf'), None) if self.hf_config.attn is None else super().derive_max_model_len_and_key()

    def _of_attention(self, name: str) -> int:
        attn = self.hf_config.attn
        if attn is None:
            return 0
        found = {spec[name] for spec in (attn if isinstance(attn, list) else [attn])}
        if len(found) > 1:
            raise ValueError(f'{name} must be the same in all attention layers (config.attn) for vLLM, got {sorted(found)}')
        return found.pop()


class LonghornServingConfig(MambaModelConfig):
    """What vLLM settles for its Mamba models, and Longhorn's refusals."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        speculative, cache = vllm_config.speculative_config, vllm_config.cache_config
        # vLLM 0.32 hands a draft model the block table of the first group, whose states its keys would overwrite
        # (v1/worker/gpu_model_runner.py, lines 2532 to 2545)
        if speculative is not None and speculative.method != 'ngram':
            raise ValueError(
                f"speculative_config must have method 'ngram' for Longhorn in vLLM, got {speculative.method!r}: "
                'generate(assistant_model=...) of transformers takes drafts from another model'
            )
        if speculative is not None and cache.enable_prefix_caching:
            # vLLM would then move states by counts of accepted drafts; with attention layers it is on by default
            raise ValueError('enable_prefix_caching must be False with speculative_config for Longhorn in vLLM, got True')
        if cache.enable_prefix_caching and not cache.user_specified_block_size:
            # states are kept at the ends of blocks, and vLLM settles the block of a CPU only later
            cache.block_size = BLOCK_SIZE
        super().verify_and_update_config(vllm_config)


class SwappedConvertor(ModelArchConfigConvertorBase):
    """Raises for fla's families with Longhorn as their mixer; vLLM itself judges others."""

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_swapped(hf_config):
            raise ValueError("vLLM serves Longhorn's own models alone, got attn_mode='longhorn' in "
                             f'{hf_config.architectures}: use `transformers serve`')
        super().__init__(hf_config, *args, **kwargs)


MODEL_ARCH_CONFIG_CONVERTORS['longhorn'] = LonghornConvertor
for _model_type in FAMILIES:
    MODEL_ARCH_CONFIG_CONVERTORS.setdefault(_model_type, SwappedConvertor)
for _name in ARCHITECTURES:
    for _suffix in SUFFIXES:
        # sets the length of the tokens that share a state, which a model without attention layers gets nowhere else
        MODELS_CONFIG_MAP[_name.replace(SUFFIXES[0], _suffix)] = LonghornServingConfig
