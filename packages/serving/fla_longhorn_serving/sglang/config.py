"""What SGLang asks of the config of a model with recurrent states."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.runtime_context import get_parallel, get_spec

from fla_longhorn.models import LonghornConfig
from fla_longhorn_serving import check_known


class ServedConfig(LonghornConfig):
    """Longhorn's config with the sizes of a request's states."""

    # SGLang counts them, though a model without attention layers has none
    num_attention_heads = num_key_value_heads = 1

    # transformers gives a config without this method one of its own, which sets no defaults
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return []

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """The convolution's last `conv_size` inputs and the state `[H, K, V]` of each layer, both in float32.

        Raises:
            ValueError: the config or SGLang's options ask for what is not served.
        """
        check_known('SGLang', self)
        if self.attn is not None:
            raise ValueError(f'attn must be None for SGLang, got {self.attn}')
        parallel, algorithm = get_parallel(), get_spec().speculative_algorithm
        for name, value in (('tp_size', parallel.tp_size), ('pp_size', parallel.pp_size)):
            if value > 1:
                raise ValueError(f'{name} must be 1 for Longhorn in SGLang, got {value}')
        if algorithm is not None:
            raise ValueError('speculative_algorithm must be None for Longhorn in SGLang, which has no way back to the state '
                             f'before a rejected token, got {algorithm!r}')
        size = round(self.hidden_size * self.expand)
        shape = Mamba2StateShape(
            conv=[(size, self.conv_size)], temporal=(self.num_heads, self.state_size, size // self.num_heads),
            intermediate_size=size, conv_dim=size, ssm_state_size=self.state_size, num_heads=self.num_heads,
            head_dim=size // self.num_heads, state_size=self.state_size, conv_kernel=self.conv_size,
        )
        return Mamba2CacheParams(
            shape=shape, layers=list(range(self.num_hidden_layers)),
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
        )
