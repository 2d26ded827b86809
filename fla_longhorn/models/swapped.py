"""Calls of fla's models with Longhorn as their mixer, checked and translated like those of Longhorn's own models.

Their `forward` is fla's, so hooks on the base model check the arguments and replace those of packed sequences by `cu_seqlens`.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch.nn as nn
from fla.models.modeling_utils import FLAModel

from fla_longhorn.models.call import begin_call, end_call
from fla_longhorn.modules.cache import CACHE, look_ahead, rename_cache

# the names of its arguments, less `self` and the keywords
ARGUMENTS = tuple(inspect.signature(FLAModel.forward).parameters)[1:-1]


def before_forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    kwargs = rename_cache(kwargs)
    known = {name: kwargs[name] for name in ARGUMENTS if name in kwargs}
    rest = {name: x for name, x in kwargs.items() if name not in ARGUMENTS}
    tokens = known.get('inputs_embeds') if known.get('input_ids') is None else known['input_ids']
    mask, cache, use_cache, rest = begin_call(
        model, rest, known.get('attention_mask'), tokens, known.get('past_key_values'), known.get('use_cache'),
    )
    if not use_cache and cache is not None:
        # fla's attention and feed-forward layers update any cache that they get
        original, ahead = cache, cast(Any, look_ahead(cache))
        ahead.looks_ahead_of, cache = original, ahead
    return (), {**known, 'attention_mask': mask, 'past_key_values': cache, 'use_cache': use_cache, **rest}


def after_forward(model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Return the caller's cache, not its copy."""
    cache = kwargs['past_key_values']
    if kwargs['use_cache']:
        end_call(cache, kwargs['attention_mask'], output[0].shape[1], kwargs.get('rows'))
    if isinstance(output, tuple):
        return tuple(getattr(x, 'looks_ahead_of', x) for x in output)
    cache = getattr(output, CACHE)
    if cache is not None:
        setattr(output, CACHE, getattr(cache, 'looks_ahead_of', cache))
    return output
