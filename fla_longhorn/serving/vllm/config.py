"""What vLLM has to know of a Longhorn config before it builds the model."""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from fla_longhorn.attn_mode.config import is_swapped
from fla_longhorn.models import LonghornConfig


class LonghornConvertor(ModelArchConfigConvertorBase):
    """Names the class of a model, with attention layers or without, and counts its attention heads.

    vLLM plans its pages by these numbers, and takes the attention layers to be alike in them.
    """

    def __init__(self, hf_config: LonghornConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, *args, **kwargs)
        # vLLM's loader reads them there
        hf_config.architectures = ['LonghornForCausalLM' if hf_config.attn is None else 'LonghornHybridForCausalLM']

    def get_total_num_attention_heads(self) -> int:
        return self._of_attention('num_heads')

    def get_total_num_kv_heads(self) -> int:
        return self._of_attention('num_kv_heads')

    def _of_attention(self, name: str) -> int:
        attn = self.hf_config.attn
        if attn is None:
            return 0
        found = {spec[name] for spec in (attn if isinstance(attn, list) else [attn])}
        if len(found) > 1:
            raise ValueError(f'{name} must be the same in all attention layers (config.attn) for vLLM, got {sorted(found)}')
        return found.pop()


class SwappedConvertor(ModelArchConfigConvertorBase):
    """Refuses fla's families where Longhorn is their mixer; others go on to what vLLM says of them."""

    def __init__(self, hf_config: Any, *args: Any, **kwargs: Any) -> None:
        if is_swapped(hf_config):
            raise ValueError("vLLM serves Longhorn's own models alone, got attn_mode='longhorn' in "
                             f'{hf_config.architectures}: use `transformers serve`')
        super().__init__(hf_config, *args, **kwargs)
