"""fla's cache: its names in a call, calls that leave it unchanged, and a cache that returns to a snapshot or goes to a file.

Assisted generation returns where its guesses were wrong. A recurrent state cannot be cut back to fewer tokens, so the tokens
between the snapshot and the wanted length are read again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from typing import Any, cast

import torch
from fla.models.cache_utils import FLACache, FLALayer
from fla.models.utils import Cache
from transformers.generation import GenerationMixin

# transformers' name of the cache in calls and outputs: `past_key_values` before 5.24, and in fla
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = 'cache' if 'cache' in _ARGUMENTS else 'past_key_values'

# names in a file of states: of a tensor, or of one of several
ENTRY = r'(\d+)\.(recurrent_state|attn_state|conv_state|ffn_state|window_size)(?:\.(\d+))?'


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
    """fla's cache with snapshots, and with the padding that its rows have read; the models make one if they get none.

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
        # which of the columns that the rows have read are no padding, bool `[B, n]`; all later ones are none
        self.read: torch.Tensor | None = None

    def snapshot(self) -> RewindableCache:
        """A copy that later calls do not change, which is a cache itself."""
        again = copy(self)
        again.layers, again.past = [copy(layer) for layer in self.layers], []
        for layer in again.layers:
            layer.state = layer._map_state(torch.clone)
        return again

    def restore(self, snapshot: RewindableCache) -> None:
        """Return to `snapshot`, which may be restored again."""
        self.layers, self.missing, self.read = snapshot.snapshot().layers, snapshot.missing, snapshot.read

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of all that the cache remembers, less what it recorded for :meth:`crop`: tensors, as `'0.conv_state'`."""
        found: dict[str, Any] = {'tokens': self.get_seq_length(), 'missing': self.missing, 'read': self.read}
        for i, layer in enumerate(self.layers):
            found[f'{i}.window_size'] = layer.window_size
            for name, x in (layer.state or {}).items():
                several = isinstance(x, (tuple, list))
                found |= {f'{i}.{name}.{j}': y for j, y in enumerate(x)} if several else {f'{i}.{name}': x}
        return {name: copied(x) for name, x in found.items() if x is not None}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Become a copy of the cache whose :meth:`state_dict` this is, on the devices of its tensors.

        Raises:
            ValueError: a name is missing or unknown.
        """
        rest: dict[str, Any] = {name: copied(x) for name, x in state_dict.items()}
        found: dict[int, dict[str, Any]] = {}
        layers = []
        try:
            tokens, missing, read = int(rest.pop('tokens')), int(rest.pop('missing')), rest.pop('read', None)
            for name, x in rest.items():
                i, kind, part = cast(Any, re.fullmatch(ENTRY, name)).groups()
                states = found.setdefault(int(i), {})
                states[kind] = x if part is None else {**states.get(kind, {}), int(part): x}
            for i in range(len(found)):
                states = found[i]
                window = {'window_size': int(states.pop('window_size'))} if 'window_size' in states else {}
                several = {kind: x for kind, x in states.items() if isinstance(x, dict)}
                states |= {kind: tuple(x[j] for j in range(len(x))) for kind, x in several.items()}
                layers.append(FLALayer())
                layers[i].update(**states, cache_kwargs=window)
                # `update` counts the keys of a window
                layers[i]._seen_tokens = tokens
        except (KeyError, AttributeError) as error:
            raise ValueError(
                f'state_dict must be whole, as RewindableCache.state_dict makes it, got the names {", ".join(state_dict)}'
            ) from error
        self.layers, self.missing, self.read, self.past = layers, missing, read, []

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
        self.past, self.missing, self.read = [], 0, None

    def _transform_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Reorder, repeat or select rows, for beam search."""
        super()._transform_states(function)
        self.read = None if self.read is None else function(self.read)
        for cache in self.past:
            cache._transform_states(function)


def copied(x: torch.Tensor | int) -> torch.Tensor:
    return torch.as_tensor(x).detach().clone(memory_format=torch.contiguous_format)
