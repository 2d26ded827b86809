"""Longhorn as the mixer of a family's block, and adapters for irregular families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.layers.rodimus import SlidingWindowSharedKeyAttention, autocast_to_fp16

from fla_longhorn.layers import Longhorn
from fla_longhorn.modules.attention import attend_padded, load_again, padding_of

if TYPE_CHECKING:
    from fla.models.utils import Cache


class LonghornMixer(Longhorn):
    """Longhorn as fla's `_init_weights` initialises modules; its state dict is that of :class:`Longhorn`."""

    # HGRN's and RWKV7's blocks pass these to their mixers
    ignored_keywords = ('lower_bound', 'v_first')

    def reset_parameters(self) -> None:
        """As in Longhorn's own models; fla calls it after it has initialised the submodules."""
        self.beta_proj.reset_parameters()
        nn.init.zeros_(self.beta_proj.bias)
        nn.init.ones_(self.D)

    @property
    def o_proj(self) -> nn.Linear:
        """fla rescales the weights of `o_proj`, for residual branches; loaded weights must not be rescaled."""
        if getattr(self.out_proj.weight, '_is_hf_initialized', False):
            raise AttributeError('o_proj')
        return self.out_proj


class RodimusPlusMixer(LonghornMixer):
    """Returns its state to the attention that follows in the block, which stores both in the cache."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Cache | None = None,
        *args: Any, **kwargs: Any,
    ) -> tuple[torch.Tensor, None, tuple[Cache | None, tuple | None]]:
        pending = None if past_key_values is None else PendingCache(past_key_values)
        o, _, _ = super().forward(hidden_states, attention_mask, pending, *args, **kwargs)
        return o, None, (past_key_values, None if pending is None else pending.states)


class PendingCache:
    """Reads a cache, but keeps updates as `states`, `(recurrent_state, conv_state)`."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.states: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.cache[layer_idx]

    def update(self, *, recurrent_state: torch.Tensor | None, conv_state: torch.Tensor | None, **kwargs) -> None:
        self.states = (recurrent_state, conv_state)


_SharedKeyAttention: Any = load_again('fla.layers.rodimus').SlidingWindowSharedKeyAttention


class SharedKeyAttention(SlidingWindowSharedKeyAttention):
    """The attention of Rodimus+ beside the mixer, also without flash_attn, and with padding anywhere in the rows."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None,
        *args: Any, rodimus_caches: tuple | None = None, rows: Any = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        cache = past_key_values
        if kwargs.get('cu_seqlens') is None:
            kept, attention_mask = padding_of(hidden_states, attention_mask, cache, self.layer_idx, rows)
            if kept is not None:
                names = 'recurrent_state', 'conv_state'
                states = {} if rodimus_caches is None else dict(zip(names, rodimus_caches, strict=True))
                return attend_padded(self, hidden_states, kept, cache, **states), None, cache
        return _SharedKeyAttention.forward(
            self, hidden_states, attention_mask, cache, *args, rodimus_caches=rodimus_caches, **kwargs,
        )

    def align(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(autocast_to_fp16, (q, k.expand_as(v), v)))


def replace_shared_key_attention(block: nn.Module) -> None:
    for module in block.children():
        if type(module) is SlidingWindowSharedKeyAttention:
            module.__class__ = SharedKeyAttention


def shift_over_padding(block: nn.Module) -> None:
    """The feed-forward layers of RWKV mix a token with the one before it, which may be padding."""
    block.get_submodule('ffn').register_forward_pre_hook(fill_padding)


def fill_padding(ffn: Any, args: tuple) -> tuple | None:
    """Where `x` `[B, T, D]` is padding, the last token of the row before it, or what the cache holds of that."""
    x, mask, cache, *rest = args
    if mask is None:
        return None
    T, past = x.shape[1], None if cache is None else cache[ffn.layer_idx]['ffn_state']
    before = torch.zeros_like(x[:, :1]) if past is None else past.view_as(x[:, :1]).to(x)
    columns = torch.arange(1, T + 1, device=x.device, dtype=torch.int64)
    last = torch.where(mask[:, -T:] != 0, columns, 0).cummax(1).values
    filled = torch.cat([before, x], 1).gather(1, last[..., None].expand_as(x))
    return filled, None, cache, *rest


def append_v_first(block: nn.Module) -> None:
    """RWKV7's blocks expect `v_first`, the first layer's values, in the output of a mixer."""
    block.get_submodule('attn').register_forward_hook(add_v_first, with_kwargs=True)


def add_v_first(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> tuple:
    return *output, kwargs['v_first']
