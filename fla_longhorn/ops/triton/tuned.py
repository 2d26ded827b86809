"""Launch parameters that were timed on the card at hand, from a file.

The environment variable `FLA_LONGHORN_TUNED` names the file, and is read once. Without it the rules alone decide.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, TypeVar

import triton

from fla_longhorn.ops.triton.device import Card

VARIABLE = 'FLA_LONGHORN_TUNED'
PATH = os.environ.get(VARIABLE)
Config = TypeVar('Config')


def circumstances(card: Card) -> dict[str, Any]:
    """What the times depend on: with another Triton, version of this package or card, a file is out of date."""
    package = sys.modules[__name__.partition('.')[0]]
    return {'triton': triton.__version__, 'fla-longhorn': getattr(package, '__version__', None), 'card': asdict(card)}


def key_of(K: int, V: int, precision: str) -> str:
    return f'K = {K}, V = {V}, {precision}'


@lru_cache
def read_choices(path: str, card: Card) -> dict[str, dict[str, dict[str, Any]]]:
    """Changed launch parameters by rule and `key_of`: none where the file is out of date, which a warning says.

    Raises:
        ValueError: If the file cannot be read, or is not one of launch parameters.
    """
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
        made, choices, now = content['made_with'], content['choices'], circumstances(card)
        if not all(isinstance(x, dict) for by_key in choices.values() for x in by_key.values()):
            raise TypeError('a choice is no table of launch parameters')
        changed = [name for name, value in now.items() if made.get(name) != value]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{VARIABLE} names {path}, which is no file of launch parameters: {type(error).__name__}: {error}',
        ) from error
    if not changed:
        return choices
    warnings.warn(f'{path} was tuned with another {" and ".join(changed)}, and is not used; tune again', stacklevel=2)
    return {}


def tuned(config: Config, name: str, K: int, V: int, precision: str, card: Card) -> Config:
    """`config` with what the file says of the rule `name`."""
    if PATH is None:
        return config
    changes = read_choices(PATH, card).get(name, {}).get(key_of(K, V, precision))
    if not changes:
        return config
    try:
        return replace(config, **changes)  # type: ignore[type-var]
    except (TypeError, AssertionError) as error:
        raise ValueError(f'{VARIABLE} names {PATH}, in which {name} has {changes}: {error}') from error
