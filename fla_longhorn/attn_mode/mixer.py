"""Longhorn as the mixer of a family's block, and adapters for irregular families."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from fla_longhorn.layers import Longhorn


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
