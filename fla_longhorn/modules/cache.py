"""fla's cache: reading a layer's states, and calls that leave the cache unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn as nn
from fla.layers.attn import Attention
from fla.models.cache_utils import FLACache, LegacyFLACache
from transformers.cache_utils import Cache as HFCache
from transformers.generation import GenerationMixin

from fla_longhorn.ops.inputs import LOW_PRECISIONS
from fla_longhorn.ops.plain import is_transformed

if TYPE_CHECKING:
    from fla.models.utils import Cache

    from fla_longhorn.modules.tensor_parallel import Part

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


def read_states(
    layer: Any, state: dict[str, Any] | None, N: int, part: Part | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`(recurrent_state, conv_state)` of N sequences from a cache's entry for a layer; `(None, None)` for an empty entry.

    With tensor parallelism, they are those of this rank's channels, `part`.

    Raises:
        ValueError: the entry is not this layer's, such as that of another model's cache.
        TypeError: a state has a dtype that the operators do not accept.
    """
    if state is None:
        return None, None
    H, D = (layer.num_heads, layer.intermediate_size) if part is None else (part.num_heads, part.num_channels)
    wanted = {'recurrent_state': (N, H, layer.state_size, D // H), 'conv_state': (N, D, layer.conv_size)}
    for name, shape in wanted.items():
        x = state.get(name)
        if not isinstance(x, torch.Tensor) or x.shape != shape:
            got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                f'past_key_values must hold a {name} of shape {list(shape)}, one per sequence, in layer {layer.layer_idx}, '
                f'got {got}: is it the cache of another model or of another batch?'
            )
        if x.dtype not in LOW_PRECISIONS:
            raise TypeError(
                f'past_key_values must hold a {name} of float16, bfloat16 or float32 in layer {layer.layer_idx}, got {x.dtype}'
            )
    recurrent_state, conv_state = state['recurrent_state'], state['conv_state']
    # states from `torch.inference_mode` can be used neither by autograd nor in place; a trace cannot ask for it
    if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
        if recurrent_state.is_inference() or conv_state.is_inference():
            return recurrent_state.clone(), conv_state.clone()
    return recurrent_state, conv_state


def can_update_in_place(state: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether decoding may update the cache's state in place: nothing differentiates through it."""
    if state is None or torch.is_grad_enabled() or state.requires_grad or is_transformed():
        return False
    return state.dtype == torch.float32 and state.is_contiguous()


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


def seen_tokens(cache: Cache | None) -> int:
    return cache.get_seq_length() if isinstance(cache, HFCache) else 0


def check_cache(cache: Any) -> None:
    """Raise for a cache of transformers, which has no room for recurrent states."""
    if isinstance(cache, HFCache) and not isinstance(cache, (FLACache, LegacyFLACache)):
        raise TypeError(
            'past_key_values must be None for a new cache or one of fla\'s, such as '
            f'fla_longhorn.modules.rewind.RewindableCache(), got {type(cache).__name__}'
        )


def check_layers(cache: Cache | None, layers: Iterable[nn.Module]) -> None:
    """Raise for a filled cache of another model, in which attention layers of `layers` have no state.

    Longhorn's layers check their own states.
    """
    check_cache(cache)
    if cache is None or seen_tokens(cache) == 0:
        return
    layers = list(layers)
    if len(cache) != len(layers):
        raise ValueError(f'past_key_values must hold the states of {len(layers)} layers, got {len(cache)}')
    for i, layer in enumerate(layers):
        if isinstance(getattr(layer, 'attn', None), Attention) and cache[i]['attn_state'] is None:
            raise ValueError(f'past_key_values must hold attention states in layer {i}, got None: is it of another model?')
