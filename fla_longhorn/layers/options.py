"""Checks of the layer's options."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from fla_longhorn.ops.inputs import MAX_STATE_SIZE

MODES = ('chunk', 'fused_recurrent')
GATES = (None, 'head', 'channel')


def check_options(
    *, mode: Any, hidden_size: Any, state_size: Any, expand: Any, num_heads: Any, conv_size: Any, beta_rank: Any, k_norm: Any,
    norm_eps: Any, layer_idx: Any = None, allow_neg_eigval: Any = False, gate: Any = None, **flags: Any,
) -> None:
    """Raise `TypeError` (wrong type) or `ValueError` (wrong value) that names the option; `flags` must be bool."""
    if mode not in MODES:
        raise ValueError(f'mode must be one of {list(MODES)}, got {mode!r}')
    check_integer('hidden_size', hidden_size)
    check_integer('state_size', state_size, most=MAX_STATE_SIZE)
    check_integer('num_heads', num_heads)
    check_integer('conv_size', conv_size)
    for name, flag in (flags | {'allow_neg_eigval': allow_neg_eigval}).items():
        if not isinstance(flag, bool):
            raise TypeError(f'{name} must be True or False, got {flag!r}')
    check_number('expand', expand)
    channels = hidden_size * expand
    if channels < 1 or not math.isclose(channels, round(channels)):
        raise ValueError(f'expand * hidden_size must be a positive integer, got {expand} * {hidden_size}')
    if round(channels) % num_heads:
        raise ValueError(f'num_heads must divide expand * hidden_size = {round(channels)}, got {num_heads}')
    if k_norm not in (None, 'l2'):
        raise ValueError(f"k_norm must be None or 'l2', got {k_norm!r}")
    if gate not in GATES:
        raise ValueError(f"gate must be None, 'head' or 'channel', got {gate!r}")
    if beta_rank != 'auto' and (not is_integer(beta_rank) or beta_rank < 1):
        raise ValueError(f"beta_rank must be 'auto' or a positive integer, got {beta_rank!r}")
    if k_norm == 'l2' and allow_neg_eigval:
        warnings.warn(
            "allow_neg_eigval gives no negative eigenvalue with k_norm='l2': |k| = 1 and beta < 1 keep a doubled step below 1",
            stacklevel=3,
        )
    check_number('norm_eps', norm_eps)
    if layer_idx is not None:
        check_integer('layer_idx', layer_idx, least=0)


def misspelt(names: Iterable[str], options: Iterable[str], cutoff: float) -> dict[str, str]:
    """Those of `names` that are nearly an option, by `difflib`'s ratio, and which; `other_exact` is a name of its own."""
    options = tuple(options)
    apart = [name for name in names if not any(f'_{option}_' in f'_{name}_' for option in options)]
    near = {name: get_close_matches(name.lower(), options, 1, cutoff) for name in apart}
    return {name: found[0] for name, found in near.items() if found}


def rank_of(beta_rank: int | str, hidden_size: int) -> int:
    """The rank of the projection to the step sizes, Mamba's of `dt` where it is `'auto'`."""
    return math.ceil(hidden_size / 16) if beta_rank == 'auto' else int(beta_rank)


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> None:
    if not is_integer(value):
        raise TypeError(f'{name} must be an integer, got {value!r}')
    if value < least or (most is not None and value > most):
        wanted = f'at least {least}' if most is None else f'between {least} and {most}'
        raise ValueError(f'{name} must be {wanted}, got {value}')


def check_number(name: str, value: Any) -> None:
    """Positive and finite."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f'{name} must be a number, got {value!r}')
    if not 0 < float(value) < math.inf:
        raise ValueError(f'{name} must be positive and finite, got {value}')
