"""Calls of fla's models with Longhorn as their mixer, checked and translated like those of Longhorn's own models.

Their `forward` is fla's, so hooks on the base model check the arguments and replace those of packed sequences by `cu_seqlens`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn as nn
from fla.models.modeling_utils import FLAModel

from fla_longhorn.models.call import resolve_call
from fla_longhorn.models.checkpointing import pause_checkpointing, resume_checkpointing
from fla_longhorn.modules.cache import CACHE, look_ahead, rename_cache
from fla_longhorn.modules.rewind import RewindableCache

# the names of its arguments, less `self` and the keywords
ARGUMENTS = tuple(inspect.signature(FLAModel.forward).parameters)[1:-1]


def before_forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    kwargs = rename_cache(kwargs)
    known = {name: kwargs[name] for name in ARGUMENTS if name in kwargs}
    rest = {name: x for name, x in kwargs.items() if name not in ARGUMENTS}
    tokens = known.get('inputs_embeds') if known.get('input_ids') is None else known['input_ids']
    cache = known.get('past_key_values')
    known['attention_mask'], rest = resolve_call(model, rest, known.get('attention_mask'), tokens, cache)
    pause_checkpointing(model, cache)
    use_cache = known.get('use_cache')
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    if use_cache and cache is None:
        known['past_key_values'] = RewindableCache()
    elif not use_cache and cache is not None:
        # fla's attention and feed-forward layers update any cache that they get
        known['past_key_values'] = look_ahead(cache)
        known['past_key_values'].looks_ahead_of = cache
    return (), {**known, **rest}


def after_forward(model: nn.Module, args: tuple, output: Any) -> Any:
    """Return the caller's cache, not its copy; after an error there is no output."""
    resume_checkpointing(model)
    if output is None:
        return None
    if isinstance(output, tuple):
        return tuple(getattr(x, 'looks_ahead_of', x) for x in output)
    cache = getattr(output, CACHE)
    if cache is not None:
        setattr(output, CACHE, getattr(cache, 'looks_ahead_of', cache))
    return output

