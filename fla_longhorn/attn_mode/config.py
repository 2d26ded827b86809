"""The `longhorn_` keys of a family's config with `attn_mode='longhorn'`: checks, defaults, and reverting them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fla.models.configuration_utils import parse_attention_config

from fla_longhorn.attn_mode.families import FAMILIES, REFUSED
from fla_longhorn.layers import Longhorn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODE = 'longhorn'
PREFIX = 'longhorn_'
# config key with what `prepare` changed: `{'derived': options that it set, 'replaced': the family's own values}`
RECORD = 'longhorn'
# the layer's options that a config sets by a prefixed key, and their defaults
OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Longhorn).parameters.items()
    if name not in ('hidden_size', 'norm_eps', 'layer_idx')
}
# options whose defaults follow the family's own keys; the others keep the default of the config's first use
FROM_FAMILY = ('expand', 'num_heads', 'conv_size', 'conv_bias')


def is_swapped(config: PreTrainedConfig) -> bool:
    return getattr(config, 'attn_mode', None) == MODE and config.model_type != MODE


def prepare(config: PreTrainedConfig) -> None:
    """Check a config with `attn_mode='longhorn'` and set every missing `longhorn_` key, to be saved with it.

    Unless the user sets them, the keys of `FROM_FAMILY` are updated when the family's own keys change.

    Raises:
        ValueError: the family cannot host Longhorn, or a `longhorn_` key is not an option of Longhorn.
    """
    check_family(config)
    record = getattr(config, RECORD, None) or {'derived': {}, 'replaced': {}}
    if not (isinstance(record, dict) and record.keys() == {'derived', 'replaced'}):
        raise ValueError(
            f"{RECORD} is a key of the plugin's own in {type(config).__name__}, got {record!r}: the options are "
            f'{", ".join(PREFIX + name for name in OPTIONS)}'
        )
    present = {name.removeprefix(PREFIX): value for name, value in vars(config).items() if name.startswith(PREFIX)}
    if unknown := sorted(present.keys() - OPTIONS.keys()):
        raise ValueError(
            f'{type(config).__name__} got {", ".join(PREFIX + name for name in unknown)}; '
            f'the options of Longhorn are {", ".join(PREFIX + name for name in OPTIONS)}'
        )
    derived = {name: value for name, value in record['derived'].items() if name in present and present[name] == value}
    given = {name: value for name, value in present.items() if name not in derived or name not in FROM_FAMILY}
    derived |= {name: value for name, value in default_options(config, given).items() if name not in given}
    for name, value in derived.items():
        setattr(config, PREFIX + name, value)
    replaced = dict(record['replaced'])
    for name, value in FAMILIES[config.model_type].settings.items():
        if getattr(config, name) != value:
            replaced[name] = getattr(config, name)
            setattr(config, name, value)
    setattr(config, RECORD, {'derived': derived, 'replaced': replaced})
    # families without hybrid layers do not parse it
    if getattr(config, 'attn', None) is not None:
        config.attn = parse_attention_config(config.attn, num_hidden_layers=config.num_hidden_layers)


def revert(config: PreTrainedConfig) -> None:
    """Undo :func:`prepare`, for a config that was changed to another `attn_mode`."""
    record = getattr(config, RECORD)
    for name, value in record['derived'].items():
        if getattr(config, PREFIX + name, None) == value:
            vars(config).pop(PREFIX + name, None)
    for name, value in record['replaced'].items():
        if getattr(config, name) == FAMILIES[config.model_type].settings[name]:
            setattr(config, name, value)
    delattr(config, RECORD)


def settle(config: PreTrainedConfig) -> bool:
    """Prepare a config before something is built from it, or revert it; returns whether the mixer is Longhorn."""
    if is_swapped(config):
        prepare(config)
        return True
    if config.model_type in FAMILIES and getattr(config, RECORD, None) is not None:
        revert(config)
    return False


def check_family(config: PreTrainedConfig) -> None:
    family = FAMILIES.get(config.model_type)
    if family is not None and family.find_block() is not None:
        return
    reason = REFUSED.get(config.model_type, 'it has no mixer that attn_mode chooses') if family is None else family.unknown
    raise ValueError(
        f'attn_mode={MODE!r} does not work in {type(config).__name__}: {reason}; '
        f'the model types that take it are {", ".join(name for name, known in FAMILIES.items() if known.find_block())}'
    )


def default_options(config: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's defaults, with the channels, heads and convolution of the family's native mixer."""
    options = {**OPTIONS, 'expand': FAMILIES[config.model_type].expand(config)}
    for name in ('conv_size', 'conv_bias'):
        options[name] = getattr(config, name, options[name])
    channels = round(config.hidden_size * given.get('expand', options['expand']))
    options['num_heads'] = math.gcd(FAMILIES[config.model_type].heads(config), channels)
    return options
