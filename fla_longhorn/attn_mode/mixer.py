"""Longhorn as the mixer of a family's block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.models.modeling_utils import get_attention

from fla_longhorn.attn_mode.config import OPTIONS, PREFIX
from fla_longhorn.layers import Longhorn

if TYPE_CHECKING:
    from fla.models.utils import Cache
    from transformers import PreTrainedConfig


def build_mixer(config: PreTrainedConfig, layer_idx: int) -> nn.Module:
    """Longhorn as layer `layer_idx` of a prepared config, or attention where the config asks for it in this layer.

    Most families' blocks build their attention layers before they come to their mixer; those without hybrid layers get
    them here.
    """
    attention = get_attention(config, layer_idx) if getattr(config, 'attn', None) is not None else None
    if attention is not None:
        return attention
    mixer = RodimusPlusMixer if getattr(config, 'block_type', None) == 'rodimus_plus' else LonghornMixer
    return mixer(
        hidden_size=config.hidden_size,
        norm_eps=config.norm_eps,
        layer_idx=layer_idx,
        **{name: getattr(config, PREFIX + name) for name in OPTIONS},
    )


class LonghornMixer(Longhorn):
    """Longhorn where fla's `_init_weights` initialises it, with the state dict of :class:`Longhorn`."""

    # HGRN's and RWKV7's blocks hand these to their mixers
    ignored_keywords = ('lower_bound', 'v_first')

    def reset_parameters(self) -> None:
        """As in Longhorn's own models. fla calls it after it has initialised the children, all by one rule."""
        self.beta_proj.reset_parameters()
        nn.init.zeros_(self.beta_proj.bias)
        nn.init.ones_(self.D)

    @property
    def o_proj(self) -> nn.Linear:
        """The output projection by the name under which fla rescales residual branches, until it holds loaded weights."""
        if getattr(self.out_proj.weight, '_is_hf_initialized', False):
            raise AttributeError('o_proj')
        return self.out_proj


class RodimusPlusMixer(LonghornMixer):
    """Leaves its state to the attention that follows in the block, which writes both into the cache."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs,
    ) -> tuple[torch.Tensor, None, tuple[Cache | None, tuple | None]]:
        pending = None if past_key_values is None else PendingCache(past_key_values)
        o, _, _ = super().forward(hidden_states, attention_mask, pending, use_cache, output_attentions, **kwargs)
        return o, None, (past_key_values, None if pending is None else pending.states)


class PendingCache:
    """A cache to read from that keeps `(recurrent_state, conv_state)` instead of writing them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.states: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.cache[layer_idx]

    def update(self, *, recurrent_state: torch.Tensor | None, conv_state: torch.Tensor | None, **kwargs) -> None:
        self.states = (recurrent_state, conv_state)
