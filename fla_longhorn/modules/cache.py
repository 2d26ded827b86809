"""fla's cache in a model's call: its names, and calls that leave it unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any

from fla.models.cache_utils import FLACache, LegacyFLACache
from transformers.cache_utils import Cache as HFCache
from transformers.generation import GenerationMixin

if TYPE_CHECKING:
    from fla.models.utils import Cache

# transformers' name of the cache in calls and outputs: `past_key_values` before 5.24, and in fla
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = 'cache' if 'cache' in _ARGUMENTS else 'past_key_values'


def rename_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call, with a cache that is passed as `cache` under fla's name.

    Raises:
        ValueError: the cache is passed by both names.
    """
    if 'cache' not in kwargs:
        return kwargs
    kwargs = dict(kwargs)
    cache = kwargs.pop('cache')
    if cache is not None and kwargs.get('past_key_values') is not None:
        raise ValueError('cache must be None where past_key_values is given: they are one argument')
    return kwargs if cache is None else kwargs | {'past_key_values': cache}


def accept_cache(forward: Callable) -> Callable:
    """Let `forward` of a model take the cache by either name."""
    @wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **rename_cache(kwargs))

    return run


def look_ahead(cache: Cache | list | None) -> Cache | None:
    """A copy that may be updated without changing `cache`. It shares the state tensors, so they must not be overwritten."""
    if cache is None:
        return None
    if not isinstance(cache, FLACache):
        return FLACache.from_legacy_cache(cache)
    again = copy(cache)
    again.layers = [copy(layer) for layer in cache.layers]
    for layer in again.layers:
        layer.state = copy(layer.state)
    return again


def check_cache(cache: Any) -> None:
    """Raise for a cache of transformers, which has no room for recurrent states."""
    if isinstance(cache, HFCache) and not isinstance(cache, (FLACache, LegacyFLACache)):
        raise TypeError(
            'past_key_values must be None for a new cache or one of fla\'s, such as '
            f'fla_longhorn.modules.rewind.RewindableCache(), got {type(cache).__name__}'
        )
