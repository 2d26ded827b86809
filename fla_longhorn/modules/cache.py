"""fla's cache: its names in a call, calls that leave it unchanged, and a cache that returns to a snapshot.

Assisted generation returns where its guesses were wrong. A recurrent state cannot be cut back to fewer tokens, so the tokens
between the snapshot and the wanted length are read again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

import torch
from fla.models.cache_utils import FLACache
from fla.models.utils import Cache
from transformers.generation import GenerationMixin

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


def look_ahead(cache: Cache | None) -> Cache | None:
    """A copy that may be updated without changing `cache`. It shares the state tensors, so they must not be overwritten."""
    if cache is None:
        return None
    again: Any = copy(cache)
    again.layers = [copy(layer) for layer in cache.layers]
    for layer in again.layers:
        layer.state = copy(layer.state)
    return again


def check_cache(cache: Any) -> None:
    """Raise for a cache of transformers, which has no room for recurrent states, or a list, which does not tell its length."""
    if cache is not None and not isinstance(cache, FLACache):
        raise TypeError(
            'past_key_values must be None for a new cache or one of fla\'s, such as '
            f'fla_longhorn.modules.cache.RewindableCache(), got {type(cache).__name__}'
        )


class RewindableCache(Cache):
    """fla's cache with snapshots; the models make one if they get none.

    Examples::
        >>> cache = model(prompt, use_cache=True).past_key_values
        >>> here = cache.snapshot()
        >>> model(first, past_key_values=cache, use_cache=True)
        >>> cache.restore(here)
        >>> model(second, past_key_values=cache, use_cache=True)
    """

    layers: list[Any]
    # assisted generation asks for it, from transformers 5.24 on
    is_croppable = True

    def __init__(self, seen_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(seen_tokens, **kwargs)
        # while it records: the cache before each call, since the last crop
        self.record_past = False
        # of an assistant
        self.holds_guesses = False
        self.past: list[RewindableCache] = []
        # tokens that the last crop kept and that must be read again
        self.missing = 0

    def snapshot(self) -> RewindableCache:
        """A copy that later calls do not change, which is a cache itself."""
        again = copy(self)
        again.layers, again.past = [copy(layer) for layer in self.layers], []
        for layer in again.layers:
            layer.state = layer._map_state(torch.clone)
        return again

    def restore(self, snapshot: RewindableCache) -> None:
        """Return to `snapshot`, which may be restored again."""
        self.layers, self.missing = snapshot.snapshot().layers, snapshot.missing

    def detach(self) -> None:
        """Detach the states from their autograd graphs."""
        for layer in self.layers:
            layer.state = layer._map_state(torch.Tensor.detach)

    def activate_past_recording(self) -> None:
        """Keep a snapshot before each later call, so that :meth:`crop` can go back to it."""
        self.record_past = True

    def begin(self, use_cache: bool) -> None:
        """Called by a model before it reads on, and stores what it reads with `use_cache`."""
        if self.missing:
            raise ValueError(
                f'past_key_values was cropped inside a call and has {self.get_seq_length()} tokens: the {self.missing} after '
                'them must be read again, as generate does, or restore a snapshot()'
            )
        if self.record_past and use_cache:
            self.past.append(self.snapshot())

    def crop(self, max_length: int) -> None:
        """Remove the last `-max_length` tokens, or keep the first `max_length`; 0 removes nothing.

        If the length is inside a call, the cache returns to the start of that call, and `generate` reads the tokens up to the
        length again. The recorded snapshots are dropped: another `crop` cannot go back further.

        Raises:
            RuntimeError: some of the tokens to remove were not recorded.
        """
        # a tensor in transformers 5.17
        max_length, seen = int(max_length), self.get_seq_length()
        length = max_length if max_length > 0 else max(0, seen + max_length)
        if length < seen:
            before = next((x for x in reversed(self.past) if x.get_seq_length() <= length), None)
            if before is None:
                raise RuntimeError(
                    f'crop can only remove tokens that were recorded, got a length of {length} of {seen}: call '
                    'activate_past_recording() before these tokens are read, or keep a snapshot()'
                )
            self.restore(before)
            self.missing = length - self.get_seq_length()
        self.past = []

    def reset(self) -> None:
        super().reset()
        self.past, self.missing = [], 0

    def _transform_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Reorder rows, for beam search; drops the snapshots, whose rows are in the old order."""
        super()._transform_states(function)
        self.past = []
