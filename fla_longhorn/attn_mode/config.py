"""The `longhorn_` keys of a family's config with `attn_mode='longhorn'`: checks and defaults."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from fla.models.configuration_utils import parse_attention_config

from fla_longhorn.attn_mode.families import FAMILIES, REFUSED
from fla_longhorn.layers import Longhorn
from fla_longhorn.layers.options import misspelt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODE = 'longhorn'
PREFIX = 'longhorn_'
# the layer's options that a config sets by a prefixed key, and their defaults
OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Longhorn).parameters.items()
    if name not in ('hidden_size', 'norm_eps', 'layer_idx')
}
# options whose defaults follow the family's own keys; those of the others are saved with the config
FROM_FAMILY = ('expand', 'num_heads', 'conv_size', 'conv_bias')


def is_swapped(config: PreTrainedConfig) -> bool:
    return getattr(config, 'attn_mode', None) == MODE and config.model_type != MODE


def prepare(config: PreTrainedConfig) -> None:
    """Check a config with `attn_mode='longhorn'`, and set missing `longhorn_` keys and what Longhorn needs of the family's.

    Raises:
        ValueError: the family cannot host Longhorn, or a key that starts like Longhorn's, or nearly, is no option of it.
    """
    check_family(config)
    # of the family's own names, `allow_neg_eigval` is the nearest to one with the prefix, with 0.78
    near = misspelt((x for x in vars(config) if not x.startswith(MODE)), (PREFIX + name for name in OPTIONS), 0.85)
    own = (x for x in vars(config) if x.startswith(MODE) and x.removeprefix(PREFIX) not in OPTIONS)
    if unknown := sorted([*own, *near]):
        raise ValueError(
            f'{type(config).__name__} got {", ".join(unknown)}; '
            f'the options of Longhorn are {", ".join(PREFIX + name for name in OPTIONS)}'
        )
    for name, default in OPTIONS.items():
        if name not in FROM_FAMILY and not hasattr(config, PREFIX + name):
            setattr(config, PREFIX + name, default)
    for name, value in FAMILIES[config.model_type].settings.items():
        setattr(config, name, value)
    # families without hybrid layers do not parse it
    if getattr(config, 'attn', None) is not None:
        config.attn = parse_attention_config(config.attn, num_hidden_layers=config.num_hidden_layers)


def check_family(config: PreTrainedConfig) -> None:
    family = FAMILIES.get(config.model_type)
    if family is not None and family.find_block() is not None:
        return
    reason = REFUSED.get(config.model_type, 'it has no mixer that attn_mode chooses') if family is None else family.unknown
    raise ValueError(
        f'attn_mode={MODE!r} does not work in {type(config).__name__}: {reason}; '
        f'the model types that take it are {", ".join(name for name, known in FAMILIES.items() if known.find_block())}'
    )


def mixer_options(config: PreTrainedConfig) -> dict[str, Any]:
    """The options of a prepared config; by default there are the channels, heads and convolution of the native mixer."""
    family = FAMILIES[config.model_type]
    options = {name: getattr(config, name, OPTIONS[name]) for name in ('conv_size', 'conv_bias')}
    options |= {'expand': family.expand(config)}
    options |= {name.removeprefix(PREFIX): x for name, x in vars(config).items() if name.startswith(PREFIX)}
    channels = round(config.hidden_size * options['expand'])
    return {'num_heads': math.gcd(family.heads(config), channels)} | options
