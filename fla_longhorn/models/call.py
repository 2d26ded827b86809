"""A model's call, checked and resolved once for all its layers; and what its cache remembers of padding.

fla's models with Longhorn as their mixer keep fla's `forward`: hooks on the base model check and translate their calls.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.layers.attn import Attention
from fla.models.modeling_utils import FLAModel
from transformers.cache_utils import Cache as HFCache

from fla_longhorn.modules.boundaries import check_keywords, find_rows
from fla_longhorn.modules.cache import CACHE, RewindableCache, check_cache, look_ahead, rename_cache
from fla_longhorn.ops.inputs import is_capturing
from fla_longhorn.ops.plain import is_transformed

if TYPE_CHECKING:
    from fla.models.utils import Cache

# names of a base model's arguments, less `self` and the keywords
ARGUMENTS = tuple(inspect.signature(FLAModel.forward).parameters)[1:-1]


def begin_call(
    model: Any, kwargs: dict[str, Any], mask: torch.Tensor | None, tokens: torch.Tensor | None, cache: Cache | None,
    use_cache: bool | None,
) -> tuple[torch.Tensor | None, Cache | None, bool, dict[str, Any]]:
    """Check a model's call on `tokens` `[B, T, ...]` and resolve it once for all layers.

    With attention layers, the mask covers the tokens in the cache too.

    Returns:
        The mask, `None` without padding, the cache, `use_cache`, and the keywords, with the result of :func:`find_rows` as
        `rows`.

    Raises:
        ValueError: there is no token, the cache is of another model or has read other columns, or as :func:`find_rows`.
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
    mask, kwargs = resolve_rows(model, kwargs, mask, tokens, cache)
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    if model.training and getattr(model, 'gradient_checkpointing', False):
        # transformers' checkpointed blocks get no cache
        if seen_tokens(cache):
            raise ValueError('past_key_values must be None with gradient checkpointing in training: call model.eval() first')
        if use_cache:
            warnings.warn('use_cache=True is set to False with gradient checkpointing in training', stacklevel=2)
            use_cache = False
    if use_cache and cache is None:
        cache = RewindableCache()
    elif isinstance(cache, RewindableCache):
        cache.begin(use_cache)
    return mask, cache, use_cache, kwargs


def resolve_rows(
    model: Any, kwargs: dict[str, Any], mask: torch.Tensor | None, tokens: torch.Tensor | None, cache: Cache | None,
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    if tokens is None:
        return mask, kwargs
    if tokens.dim() < 2 or not (torch.compiler.is_compiling() or tokens.numel()):
        raise ValueError(
            'input_ids must have the shape [B, T], or inputs_embeds [B, T, D], with at least one row and one token, '
            f'got {list(tokens.shape)}'
        )
    (B, T), seen = tokens.shape[:2], seen_tokens(cache)
    has_attention = getattr(model.config, 'attn', None) is not None
    rows, kwargs = find_rows(kwargs, B, T, tokens.device, mask, seen, covers_seen=has_attention)
    # traced activation checkpoints accept no object of ours as an argument
    if torch.compiler.is_compiling() or kwargs.get('cp_context') is not None:
        return mask, kwargs
    if kwargs.get('cu_seqlens') is not None:
        # boundaries win over the mask
        return None, {**kwargs, 'rows': rows}
    # the mask of an assistant's guesses takes each generated token that is `pad_token_id` for padding
    known = isinstance(cache, RewindableCache) and not cache.holds_guesses
    if mask is not None and seen and known and not is_transformed():
        # without rows, all is ones
        told = torch.ones(mask.shape, dtype=torch.bool, device='cpu') if rows is None else rows.mask
        if told is not None:
            check_read(cache, told, T)
    return (None, kwargs) if rows is None else (mask, {**kwargs, 'rows': rows})


def check_read(cache: Any, mask: torch.Tensor, T: int) -> None:
    """Raise if the mask, on the CPU, says of columns before the last T something else than what the cache has read."""
    told, seen, read = mask[:, :-T], seen_tokens(cache), cache.read
    told = told[:, max(0, told.shape[1] - seen):]
    if read is None:
        known = torch.ones_like(told)
    else:
        known = F.pad(read.cpu(), (0, seen - read.shape[1]), value=True)[:, seen - told.shape[1]:]
    if known.shape == told.shape and not torch.equal(known, told):
        row, column = (known != told).nonzero()[0].tolist()
        raise ValueError(
            f'attention_mask must repeat of the {seen} tokens in past_key_values which were padding when they were read, got '
            f'{int(told[row, column])} in row {row} for column {seen - told.shape[1] + column}, which was '
            f'{"read" if known[row, column] else "padding"} (generate does not read what it appends to a row that has ended)'
        )


def end_call(cache: Any, mask: torch.Tensor | None, T: int, rows: Any = None) -> None:
    """Keep in the cache which of the last T columns were padding; fla's own has no place for it."""
    if mask is None or not isinstance(cache, RewindableCache):
        return
    if not torch.compiler.is_compiling() and (is_transformed() or is_capturing(mask.device)):
        return
    known = None if rows is None else rows.mask
    if cache.read is None and known is not None and known[:, -T:].all():
        return
    new, before = mask[:, -T:] != 0, seen_tokens(cache) - T
    read = new[:, :0] if cache.read is None else cache.read
    cache.read = torch.cat([F.pad(read, (0, before - read.shape[1]), value=True), new], 1)


def seen_tokens(cache: Cache | None) -> int:
    return cache.get_seq_length() if isinstance(cache, HFCache) else 0


def check_layers(cache: Cache | None, layers: Iterable[nn.Module]) -> None:
    """Raise for a filled cache of another model, in which attention layers of `layers` have no state, or that was put together
    of layers that have not read as many tokens.

    Longhorn's layers check their own states.
    """
    check_cache(cache)
    if cache is None or seen_tokens(cache) == 0:
        return
    layers = list(layers)
    if len(cache) != len(layers):
        raise ValueError(f'past_key_values must hold the states of {len(layers)} layers, got {len(cache)}')
    counts = [cache.get_seq_length(i) for i in range(len(layers))]
    for i, layer in enumerate(layers):
        attn = getattr(layer, 'attn', None)
        if isinstance(attn, Attention) and cache[i]['attn_state'] is None:
            raise ValueError(f'past_key_values must hold attention states in layer {i}, got None: is it of another model?')
        if not torch.compiler.is_compiling() and counts[i] != max(counts):
            if not isinstance(attn, Attention) or counts[i] != attn.window_size:
                raise ValueError(f'past_key_values must have read as many tokens in each layer, got {counts}')
            # `update` counts the keys of a window that it is given
            cast(Any, cache).layers[i]._seen_tokens = max(counts)


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
