"""`attn_mode='longhorn'` in fla's configs: a family's model with Longhorn in place of its mixer.

A family's block builds its mixer by a name that it looks up in its modelling module. Where the config says `longhorn`, the
block's own constructor runs with that name bound to Longhorn, so that the native mixer is never built and everything else
is the family's. Where it doesn't, the constructor runs as it is. `fla_longhorn.registry` puts the wrappers in place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.layers.attn import Attention
from fla.models.configuration_utils import parse_attention_config
from fla.models.modeling_utils import FLAForCausalLM, get_attention

from fla_longhorn.layers import Longhorn
from fla_longhorn.models.swapped import register_call_hooks

if TYPE_CHECKING:
    from fla.models.utils import Cache
    from transformers import PreTrainedConfig

MODE = 'longhorn'
PREFIX = 'longhorn_'
# what a config sets by a prefixed key, with the layer's defaults
OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Longhorn).parameters.items()
    if name not in ('hidden_size', 'norm_eps', 'layer_idx')
}


def by_hidden_size(config: PreTrainedConfig) -> float:
    """The native mixer has `hidden_size` value channels."""
    return 1


def by_expand_v(config: PreTrainedConfig) -> float:
    """It has `expand_v * hidden_size`."""
    return config.expand_v


def by_heads(config: PreTrainedConfig) -> float:
    """It has heads of `expand_v * head_dim`."""
    return native_heads(config) * config.head_dim * getattr(config, 'expand_v', 1) / config.hidden_size


@dataclass(frozen=True)
class Family:
    """What the swap has to know of a family.

    Args:
        folder (str):
            Its modelling module is `fla.models.<folder>.modeling_<folder>`.
        block (str):
            Name of its block there.
        mixer (str):
            Name by which the block's constructor finds the native mixer.
        expand (Callable):
            Value channels of the native mixer, as a multiple of `hidden_size`.
        settings (Mapping, Optional):
            Config keys that are meaningless without the native mixer, and what they are set to.
    """

    folder: str
    block: str
    mixer: str
    expand: Callable[[PreTrainedConfig], float] = by_hidden_size
    settings: Mapping[str, Any] = field(default_factory=dict)


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
    'hgrn': Family('hgrn', 'HGRNBlock', 'HGRNAttention', lambda config: config.expand_ratio, NO_LOWER_BOUND),
    'hgrn2': Family('hgrn2', 'HGRN2Block', 'HGRN2Attention', settings=NO_LOWER_BOUND),
    'kda': Family('kda', 'KDABlock', 'KimiDeltaAttention', by_heads),
    'lightnet': Family('lightnet', 'LightNetBlock', 'LightNetAttention'),
    'linear_attn': Family('linear_attn', 'LinearAttentionBlock', 'LinearAttention', by_expand_v),
    'mesa_net': Family('mesa_net', 'MesaNetBlock', 'MesaNet', by_heads),
    'precond_gated_deltanet': Family(
        'precond_gated_deltanet', 'PrecondGatedDeltaNetBlock', 'PrecondGatedDeltaNet', by_heads,
    ),
    'precond_kda': Family('precond_kda', 'PrecondKDABlock', 'PrecondKDA', by_heads),
    'retnet': Family('retnet', 'RetNetBlock', 'MultiScaleRetention', by_expand_v),
    'rodimus': Family('rodimus', 'RodimusBlock', 'RodimusAttention', lambda config: 2),
    'rwkv6': Family('rwkv6', 'RWKV6Block', 'RWKV6Attention', by_expand_v),
    'rwkv7': Family('rwkv7', 'RWKV7Block', 'RWKV7Attention', lambda config: max(config.value_dim) / config.hidden_size),
}
# families with `attn_mode` that can't, and why
REFUSED = {
    'mom': 'its mixer is a router over memories, whose logits its block returns and its loss balances',
}


def native_heads(config: PreTrainedConfig) -> int:
    """Value heads of the family's mixer, 1 where it has none."""
    heads = getattr(config, 'num_v_heads', None) or getattr(config, 'num_heads', None)
    if heads is None and config.model_type == 'lightnet':
        heads = config.hidden_size // config.expand_ratio
    return heads or 1


def is_swapped(config: PreTrainedConfig) -> bool:
    return getattr(config, 'attn_mode', None) == MODE and config.model_type != MODE


def prepare(config: PreTrainedConfig) -> None:
    """Check a config with `attn_mode='longhorn'` and give it every `longhorn_` key that it lacks, to be saved with it.

    Raises:
        ValueError: the family cannot host Longhorn, or a `longhorn_` key is no option of it.
    """
    if config.model_type not in FAMILIES:
        reason = REFUSED.get(config.model_type, 'it has no mixer that attn_mode chooses')
        raise ValueError(
            f'attn_mode={MODE!r} does not work in {type(config).__name__}: {reason}; '
            f'the model types that take it are {", ".join(FAMILIES)}'
        )
    given = {name.removeprefix(PREFIX): value for name, value in vars(config).items() if name.startswith(PREFIX)}
    if unknown := sorted(given.keys() - OPTIONS.keys()):
        raise ValueError(
            f'{type(config).__name__} got {", ".join(PREFIX + name for name in unknown)}; '
            f'the options of Longhorn are {", ".join(PREFIX + name for name in OPTIONS)}'
        )
    for name, value in {**default_options(config, given), **given}.items():
        setattr(config, PREFIX + name, value)
    for name, value in FAMILIES[config.model_type].settings.items():
        setattr(config, name, value)
    # families without hybrid layers of their own leave it unparsed
    if getattr(config, 'attn', None) is not None:
        config.attn = parse_attention_config(config.attn, num_hidden_layers=config.num_hidden_layers)


def default_options(config: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's defaults, but as many channels and heads as the family's mixer has, and its convolution."""
    options = {**OPTIONS, 'expand': FAMILIES[config.model_type].expand(config)}
    for name in ('conv_size', 'conv_bias'):
        options[name] = getattr(config, name, options[name])
    channels = round(config.hidden_size * given.get('expand', options['expand']))
    options['num_heads'] = math.gcd(native_heads(config), channels)
    return options


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
        **kwargs,
    ) -> tuple[torch.Tensor, None, tuple[Cache | None, tuple | None]]:
        pending = None if past_key_values is None else PendingCache(past_key_values)
        o, _, _ = super().forward(hidden_states, attention_mask, pending, **kwargs)
        return o, None, (past_key_values, None if pending is None else pending.states)


class PendingCache:
    """A cache to read from that keeps `(recurrent_state, conv_state)` instead of writing them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.states = None

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        return self.cache[layer_idx]

    def update(self, *, recurrent_state: torch.Tensor | None, conv_state: torch.Tensor | None, **kwargs) -> None:
        self.states = (recurrent_state, conv_state)


def append_v_first(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple) -> tuple:
    """Forward hook of RWKV7's mixers, which hand the first layer's values on."""
    return *output, kwargs['v_first']


def refuse_cp_context(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of attention layers, which would leave out what other ranks hold."""
    if kwargs.get('cp_context') is not None:
        raise ValueError('cp_context must be None with attention layers (config.attn), which see one rank only')


def wrap_model_init(init: Callable) -> Callable:
    """`__init__` of fla's models, which checks and completes the config before anything is built from it."""
    def __init__(self, config, *args, **kwargs):
        if is_swapped(config):
            prepare(config)
        init(self, config, *args, **kwargs)
        if is_swapped(config) and not isinstance(self, FLAForCausalLM):
            register_call_hooks(self)

    return __init__


def wrap_block_init(init: FunctionType, family: Family) -> Callable:
    """`__init__` of a family's block, which finds Longhorn under the name of its mixer where the config says so."""
    def __init__(self, config, layer_idx):
        if not is_swapped(config):
            init(self, config, layer_idx)
            return
        names = {**init.__globals__, family.mixer: lambda **_: build_mixer(config, layer_idx)}
        FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)(self, config, layer_idx)
        for module in self.modules():
            if isinstance(module, Attention):
                module.register_forward_pre_hook(refuse_cp_context, with_kwargs=True)
        if config.model_type == 'rwkv7':
            self.attn.register_forward_hook(append_v_first, with_kwargs=True)

    return __init__


def wrap_forward(forward: Callable, shared: Callable) -> Callable:
    """`forward` that is fla's `shared` one where the mixer is Longhorn: linear_attn's own drops `cu_seqlens`."""
    def run(self, *args, **kwargs):
        return (shared if is_swapped(self.config) else forward)(self, *args, **kwargs)

    return run
