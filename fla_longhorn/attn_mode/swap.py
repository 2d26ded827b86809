"""The wrappers that `fla_longhorn.registry` puts around fla's models and blocks.

A family's block builds its mixer by a name that it looks up in its modelling module. Where the config says `longhorn`, the
block's own constructor runs with that name bound to Longhorn, so that the native mixer is never built and everything else
is the family's. fla's gated MLP is bound to ours, which is one. Where the config doesn't, the constructor runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn as nn
from fla.layers.attn import Attention
from fla.models.modeling_utils import FLAForCausalLM
from fla.modules import mlp

from fla_longhorn.attn_mode.config import is_swapped, settle
from fla_longhorn.attn_mode.families import Family
from fla_longhorn.attn_mode.mixer import build_mixer
from fla_longhorn.models.remote_code import is_remote_code
from fla_longhorn.models.swapped import register_call_hooks, with_shift_labels
from fla_longhorn.modules import GatedMLP
from fla_longhorn.modules.attention import RowwiseAttention


def wrap_model_init(init: Callable) -> Callable:
    """`__init__` of fla's models, which checks and completes the config before anything is built from it."""
    def __init__(self, config, *args, **kwargs):
        settle(config)
        init(self, config, *args, **kwargs)
        if is_swapped(config):
            # its states can be rolled back
            self._is_stateful = False
            self.is_remote_code = is_remote_code
            if not isinstance(self, FLAForCausalLM):
                register_call_hooks(self)

    return __init__


def wrap_block_init(init: FunctionType, family: Family) -> Callable:
    """`__init__` of a family's block, which finds Longhorn under the name of its mixer where the config says so."""
    def __init__(self, config, layer_idx):
        # a block may be built without a model
        if not settle(config):
            init(self, config, layer_idx)
            return
        names = {name: GatedMLP if x is mlp.GatedMLP else x for name, x in init.__globals__.items()}
        names[family.mixer] = lambda **_: build_mixer(config, layer_idx)
        FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)(self, config, layer_idx)
        for module in self.modules():
            if isinstance(module, Attention):
                module.__class__ = RowwiseAttention
                module.register_forward_pre_hook(refuse_cp_context, with_kwargs=True)
        if config.model_type == 'rwkv7':
            self.attn.register_forward_hook(append_v_first, with_kwargs=True)

    return __init__


def wrap_forward(forward: Callable, shared: Callable) -> Callable:
    """A method that is `shared` where the mixer is Longhorn, such as fla's `forward`: linear_attn's own drops `cu_seqlens`."""
    def run(self, *args, **kwargs):
        return (shared if is_swapped(self.config) else forward)(self, *args, **kwargs)

    return run


def wrap_causal_lm(forward: Callable) -> Callable:
    """`forward` of a causal language model that takes `shift_labels` where the mixer is Longhorn."""
    def run(self, *args, **kwargs):
        if is_swapped(self.config):
            return with_shift_labels(forward, self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return run


def append_v_first(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> tuple:
    """Forward hook of RWKV7's mixers, which hand the first layer's values on."""
    return *output, kwargs['v_first']


def refuse_cp_context(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of attention layers, which would leave out what other ranks hold."""
    if kwargs.get('cp_context') is not None:
        raise ValueError('cp_context must be None with attention layers (config.attn), which see one rank only')
