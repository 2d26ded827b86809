"""A table of fla's families; everything special about a family is in its row."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fla_longhorn.attn_mode.mixer import append_v_first, shift_over_padding

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


def by_expand_v(config: PreTrainedConfig) -> float:
    """The native mixer has `expand_v * hidden_size` value channels."""
    return config.expand_v


def by_heads(config: PreTrainedConfig) -> float:
    """The native mixer has heads of `expand_v * head_dim` value channels."""
    return native_heads(config) * config.head_dim * getattr(config, 'expand_v', 1) / config.hidden_size


def native_heads(config: PreTrainedConfig) -> int:
    """Value heads of the native mixer, 1 if it has no heads."""
    return getattr(config, 'num_v_heads', None) or getattr(config, 'num_heads', None) or 1


@dataclass(frozen=True)
class Family:
    """A family of fla."""

    # its modelling module is `fla.models.<folder>.modeling_<folder>`
    folder: str
    # classes of its block and of its native mixer there
    block: str
    native: str
    # value channels of the native mixer as a multiple of `hidden_size`, and its value heads
    expand: Callable[[PreTrainedConfig], float] = lambda config: 1
    heads: Callable[[PreTrainedConfig], int] = native_heads
    # config keys without meaning for Longhorn, and the values they get
    settings: Mapping[str, Any] = field(default_factory=dict)
    # classes whose own `forward` drops `cu_seqlens`, and the class of fla whose `forward` replaces it
    forwards: Mapping[str, str] = field(default_factory=dict)
    # called with each block after it is built
    after_build: tuple[Callable[[nn.Module], None], ...] = ()

    @property
    def module(self) -> str:
        return f'fla.models.{self.folder}.modeling_{self.folder}'

    @property
    def unknown(self) -> str:
        return f'this version of fla builds {self.native} in another way than fla-longhorn knows'

    def find_block(self) -> Any:
        """The class of the block; `None` if the installed fla lacks it or the native mixer."""
        return self._find(self.block) if self.find_native() is not None else None

    def find_model(self) -> Any:
        """The class of the base model."""
        own = (x for x in vars(import_module(self.module)).values() if getattr(x, '__module__', None) == self.module)
        return next(x for x in own if re.search('(?<!PreTrained)Model$', getattr(x, '__name__', '')))

    def find_native(self) -> Any:
        """The class of the native mixer, or `None`."""
        return self._find(self.native)

    def _find(self, name: str) -> Any:
        try:
            return getattr(import_module(self.module), name, None)
        except ImportError:
            return None


# without HGRN's mixer, the lower bounds of its forget gates are parameters without gradient
NO_LOWER_BOUND = {'use_lower_bound': False}

# the key is the config's `model_type`
FAMILIES = {
    'comba': Family('comba', 'CombaBlock', 'Comba', by_heads),
    'cyclic_flow_attention': Family('cyfa', 'CyFABlock', 'CyclicFlowAttention', by_heads),
    'delta_net': Family('delta_net', 'DeltaNetBlock', 'DeltaNet', by_expand_v),
    'deltaformer': Family('deltaformer', 'DeltaFormerBlock', 'DeltaFormerAttention'),
    'gated_deltanet': Family('gated_deltanet', 'GatedDeltaNetBlock', 'GatedDeltaNet', by_heads),
    'gated_deltaproduct': Family('gated_deltaproduct', 'GatedDeltaProductBlock', 'GatedDeltaProduct', by_heads),
    'gla': Family('gla', 'GLABlock', 'GatedLinearAttention', by_expand_v),
    'hgrn': Family('hgrn', 'HGRNBlock', 'HGRNAttention', lambda config: config.expand_ratio, settings=NO_LOWER_BOUND),
    'hgrn2': Family('hgrn2', 'HGRN2Block', 'HGRN2Attention', settings=NO_LOWER_BOUND),
    'kda': Family('kda', 'KDABlock', 'KimiDeltaAttention', by_heads),
    'lightnet': Family(
        'lightnet', 'LightNetBlock', 'LightNetAttention',
        heads=lambda config: config.num_heads or config.hidden_size // config.expand_ratio,
    ),
    'linear_attn': Family(
        'linear_attn', 'LinearAttentionBlock', 'LinearAttention', by_expand_v,
        forwards={'LinearAttentionModel': 'FLAModel', 'LinearAttentionForCausalLM': 'FLAForCausalLM'},
    ),
    'mesa_net': Family('mesa_net', 'MesaNetBlock', 'MesaNet', by_heads),
    'precond_gated_deltanet': Family('precond_gated_deltanet', 'PrecondGatedDeltaNetBlock', 'PrecondGatedDeltaNet', by_heads),
    'precond_kda': Family('precond_kda', 'PrecondKDABlock', 'PrecondKDA', by_heads),
    'retnet': Family('retnet', 'RetNetBlock', 'MultiScaleRetention', by_expand_v),
    'rwkv6': Family('rwkv6', 'RWKV6Block', 'RWKV6Attention', by_expand_v, after_build=(shift_over_padding,)),
    'rwkv7': Family(
        'rwkv7', 'RWKV7Block', 'RWKV7Attention', lambda config: max(config.value_dim) / config.hidden_size,
        after_build=(append_v_first, shift_over_padding),
    ),
}
# families with `attn_mode` that cannot host Longhorn, and why
REFUSED = {
    'mom': 'its mixer is a router over memories, whose logits its block returns and its loss balances',
    'rodimus': 'its blocks pass the states of the mixer to an attention beside it, which stores both in the cache',
}
