"""A model's call, checked and resolved once for all its layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.layers.attn import Attention
from transformers.cache_utils import Cache as HFCache

from fla_longhorn.modules.cache import check_cache
from fla_longhorn.modules.rows import check_keywords, find_rows

if TYPE_CHECKING:
    from fla.models.utils import Cache


def resolve_call(
    model: Any, kwargs: dict[str, Any], attention_mask: torch.Tensor | None, tokens: torch.Tensor | None, cache: Cache | None,
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """Check a model's call on `tokens` `[B, T, ...]` and resolve it once for all layers.

    With attention layers, the mask covers the tokens in the cache too.

    Returns:
        The mask, `None` without padding, and the keywords, with the result of :func:`find_rows` as `rows`.

    Raises:
        ValueError: there is no token, the cache is of another model, or as :func:`find_rows`.
        TypeError: an unknown keyword, or as :func:`find_rows`.
    """
    check_keywords(f'{type(model).__name__}.forward', kwargs)
    if kwargs.get('num_items_in_batch') is not None and not torch.compiler.is_compiling():
        warnings.warn(
            f'num_items_in_batch has no effect in {type(model).__name__}, which has no loss: the head around it must divide '
            'the sum of its losses by it, or have accepts_loss_kwargs = False, by which the Trainer averages over batches',
            stacklevel=2,
        )
    check_layers(cache, model.layers)
    if tokens is None:
        return attention_mask, kwargs
    if tokens.dim() < 2 or not (torch.compiler.is_compiling() or tokens.numel()):
        raise ValueError(
            'input_ids must have the shape [B, T], or inputs_embeds [B, T, D], with at least one row and one token, '
            f'got {list(tokens.shape)}'
        )
    (B, T), seen = tokens.shape[:2], seen_tokens(cache)
    length = None if getattr(model.config, 'attn', None) is None else T + seen
    rows, kwargs = find_rows(kwargs, B, T, tokens.device, attention_mask, length, filled=seen > 0)
    # traced activation checkpoints accept no object of ours as an argument
    if torch.compiler.is_compiling() or kwargs.get('cp_context') is not None:
        return attention_mask, kwargs
    if rows is None:
        return None, kwargs
    return attention_mask, {**kwargs, 'rows': rows}


def seen_tokens(cache: Cache | None) -> int:
    return cache.get_seq_length() if isinstance(cache, HFCache) else 0


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
