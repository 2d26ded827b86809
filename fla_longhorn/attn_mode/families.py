"""fla's families: what the swap has to know of each, as a table; a family's irregularities are in its row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fla_longhorn.attn_mode.mixer import LonghornMixer, RodimusPlusMixer, append_v_first, replace_shared_key_attention

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


def by_hidden_size(config: PreTrainedConfig) -> float:
    """The native mixer has `hidden_size` value channels."""
    return 1


def by_expand_v(config: PreTrainedConfig) -> float:
    """It has `expand_v * hidden_size`."""
    return config.expand_v


def by_heads(config: PreTrainedConfig) -> float:
    """It has heads of `expand_v * head_dim`."""
    return native_heads(config) * config.head_dim * getattr(config, 'expand_v', 1) / config.hidden_size


def native_heads(config: PreTrainedConfig) -> int:
    """Value heads of the family's mixer, 1 where it has none."""
    return getattr(config, 'num_v_heads', None) or getattr(config, 'num_heads', None) or 1


def always_longhorn(config: PreTrainedConfig) -> type[LonghornMixer]:
    return LonghornMixer


def leave_as_built(block: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Family:
    """What the swap has to know of a family.

    Args:
        folder (str):
            Its modelling module is `modeling_<folder>` in this folder of `fla.models`.
        block (str):
            Name of its block there.
        native (str):
            Name of the native mixer's class there.
        expand (Callable, Optional):
            Value channels of the native mixer, as a multiple of `hidden_size`. Default: 1.
        heads (Callable, Optional):
            Its value heads.
        settings (Mapping, Optional):
            Config keys that are meaningless without the native mixer, and what they are set to.
        forwards (Mapping, Optional):
            Its classes whose own `forward` drops `cu_seqlens`, and fla's shared class whose `forward` serves in its place.
        mixer (Callable, Optional):
            The class in place of the native mixer. Default: :class:`LonghornMixer`.
        after_build (Callable, Optional):
            Called with each block that has been built.
    """

    folder: str
    block: str
    native: str
    expand: Callable[[PreTrainedConfig], float] = by_hidden_size
    heads: Callable[[PreTrainedConfig], int] = native_heads
    settings: Mapping[str, Any] = field(default_factory=dict)
    forwards: Mapping[str, str] = field(default_factory=dict)
    mixer: Callable[[PreTrainedConfig], type[LonghornMixer]] = always_longhorn
    after_build: Callable[[nn.Module], None] = leave_as_built

    @property
    def module(self) -> str:
        return f'fla.models.{self.folder}.modeling_{self.folder}'

    @property
    def unknown(self) -> str:
        return f'this version of fla builds {self.native} in another way than fla-longhorn knows'

    def find_block(self) -> Any:
        """The class of its block; None where this fla has none, or names the native mixer otherwise."""
        return self._find(self.block) if self.find_native() is not None else None

    def find_native(self) -> Any:
        """The class of its native mixer, in the same way."""
        return self._find(self.native)

    def _find(self, name: str) -> Any:
        try:
            return getattr(import_module(self.module), name, None)
        except ImportError:
            return None


# lower bounds of HGRN's forget gates: parameters that would get no gradient
NO_LOWER_BOUND = {'use_lower_bound': False}

# by `model_type`
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
    'precond_gated_deltanet': Family(
        'precond_gated_deltanet', 'PrecondGatedDeltaNetBlock', 'PrecondGatedDeltaNet', by_heads,
    ),
    'precond_kda': Family('precond_kda', 'PrecondKDABlock', 'PrecondKDA', by_heads),
    'retnet': Family('retnet', 'RetNetBlock', 'MultiScaleRetention', by_expand_v),
    'rodimus': Family(
        'rodimus', 'RodimusBlock', 'RodimusAttention', lambda config: 2,
        mixer=lambda config: RodimusPlusMixer if config.block_type == 'rodimus_plus' else LonghornMixer,
        after_build=replace_shared_key_attention,
    ),
    'rwkv6': Family('rwkv6', 'RWKV6Block', 'RWKV6Attention', by_expand_v),
    'rwkv7': Family(
        'rwkv7', 'RWKV7Block', 'RWKV7Attention', lambda config: max(config.value_dim) / config.hidden_size,
        after_build=append_v_first,
    ),
}
# families with `attn_mode` that can't, and why
REFUSED = {
    'mom': 'its mixer is a router over memories, whose logits its block returns and its loss balances',
}
