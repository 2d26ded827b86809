"""An attention layer of a hybrid model: fla's, on vLLM's pages of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope


class LonghornAttention(nn.Module):
    """:class:`fla.layers.Attention` with the settings `spec` of one layer of `config.attn`."""

    def __init__(self, vllm_config: VllmConfig, spec: dict[str, Any], prefix: str) -> None:
        super().__init__()
        config, tp_size = vllm_config.model_config.hf_config, get_tensor_model_parallel_world_size()
        quant = vllm_config.quant_config
        heads, kv_heads = spec['num_heads'], spec['num_kv_heads']
        if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
            raise ValueError(f'tensor_parallel_size must divide the attention layers\' num_heads = {heads} and divide, or be '
                             f'a multiple of, num_kv_heads = {kv_heads}, got {tp_size}')
        head_dim = config.hidden_size // heads
        self.sizes = [heads // tp_size * head_dim, *[max(1, kv_heads // tp_size) * head_dim] * 2]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, heads, kv_heads, bias=spec['qkv_bias'], quant_config=quant,
            prefix=f'{prefix}.qkv_proj',
        )
        self.o_proj = RowParallelLinear(
            heads * head_dim, config.hidden_size, bias=False, quant_config=quant, prefix=f'{prefix}.o_proj',
        )
        self.rotary = get_rope(
            head_dim, max_position=vllm_config.model_config.max_model_len,
            rope_parameters={'rope_type': 'default', 'rope_theta': spec['rope_theta']},
        )
        self.attn = Attention(
            heads // tp_size, head_dim, head_dim ** -0.5, num_kv_heads=max(1, kv_heads // tp_size),
            cache_config=vllm_config.cache_config, quant_config=quant, per_layer_sliding_window=spec['window_size'],
            prefix=f'{prefix}.attn',
        )

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.sizes, dim=-1)
        q, k = self.rotary(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]
