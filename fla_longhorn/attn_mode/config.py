"""A family's config with `attn_mode='longhorn'`: its `longhorn_` keys, checked, completed and reverted."""

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
# the key of what `prepare` did, saved with the config: `{'derived': options that it filled in, 'replaced': the family's own}`
RECORD = 'longhorn'
# what a config sets by a prefixed key, with the layer's defaults
OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Longhorn).parameters.items()
    if name not in ('hidden_size', 'norm_eps', 'layer_idx')
}
# those that follow the family's own keys; the others stay what they were when the config was first used
FROM_FAMILY = ('expand', 'num_heads', 'conv_size', 'conv_bias')


def is_swapped(config: PreTrainedConfig) -> bool:
    return getattr(config, 'attn_mode', None) == MODE and config.model_type != MODE


def prepare(config: PreTrainedConfig) -> None:
    """Check a config with `attn_mode='longhorn'` and give it every `longhorn_` key that it lacks, to be saved with it.

    A key of `FROM_FAMILY` that was filled in follows the family's own keys when those change; one that the user sets stays.

    Raises:
        ValueError: the family cannot host Longhorn, or a `longhorn_` key is no option of it.
    """
    check_family(config)
    record = getattr(config, RECORD, None) or {'derived': {}, 'replaced': {}}
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
    # families without hybrid layers of their own leave it unparsed
    if getattr(config, 'attn', None) is not None:
        config.attn = parse_attention_config(config.attn, num_hidden_layers=config.num_hidden_layers)


def take_back(config: PreTrainedConfig) -> None:
    """Undo what :func:`prepare` did to a config that no longer asks for Longhorn."""
    record = getattr(config, RECORD)
    for name, value in record['derived'].items():
        if getattr(config, PREFIX + name, None) == value:
            vars(config).pop(PREFIX + name, None)
    for name, value in record['replaced'].items():
        if getattr(config, name) == FAMILIES[config.model_type].settings[name]:
            setattr(config, name, value)
    delattr(config, RECORD)


def settle(config: PreTrainedConfig) -> bool:
    """Make a config fit for building a model or a block from it; whether that gets Longhorn."""
    if is_swapped(config):
        prepare(config)
        return True
    if config.model_type in FAMILIES and getattr(config, RECORD, None) is not None:
        take_back(config)
    return False


def check_family(config: PreTrainedConfig) -> None:
    family = FAMILIES.get(config.model_type)
    if family is not None and family.find_block() is not None:
        return
    reason = REFUSED.get(config.model_type, 'it has no mixer that attn_mode chooses')
    if family is not None:
        reason = family.unknown
    raise ValueError(
        f'attn_mode={MODE!r} does not work in {type(config).__name__}: {reason}; '
        f'the model types that take it are {", ".join(name for name, known in FAMILIES.items() if known.find_block())}'
    )


def default_options(config: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's defaults, but those of `FROM_FAMILY`: as many channels and heads as its mixer has, and its convolution."""
    options = {**OPTIONS, 'expand': FAMILIES[config.model_type].expand(config)}
    for name in ('conv_size', 'conv_bias'):
        options[name] = getattr(config, name, options[name])
    channels = round(config.hidden_size * given.get('expand', options['expand']))
    options['num_heads'] = math.gcd(FAMILIES[config.model_type].heads(config), channels)
    return options
