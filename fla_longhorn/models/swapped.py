"""Calls of fla's own models with Longhorn as their mixer: checked and translated as those of Longhorn's models.

Their `forward` is fla's, so checks and names of packed sequences are handled by hooks on the base model, below
which all layers see `cu_seqlens` alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fla_longhorn.models.causal_lm import compute_logits_and_loss
from fla_longhorn.models.checkpointing import pause_checkpointing, resume_checkpointing
from fla_longhorn.modules.cache import check_layers, look_ahead
from fla_longhorn.modules.rewind import RewindableCache
from fla_longhorn.modules.varlen import check_keywords, resolve_call

# of every model's forward
ARGUMENTS = (
    'input_ids', 'attention_mask', 'inputs_embeds', 'past_key_values', 'use_cache', 'output_attentions',
    'output_hidden_states', 'return_dict',
)


def register_call_hooks(model: nn.Module) -> None:
    """Check and translate the calls of a base model of fla's."""
    model.register_forward_pre_hook(before_forward, with_kwargs=True)
    model.register_forward_hook(after_forward, always_call=True)


def before_forward(model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args:
        kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    known = {name: kwargs[name] for name in ARGUMENTS if name in kwargs}
    rest = {name: x for name, x in kwargs.items() if name not in ARGUMENTS}
    check_keywords(f'{type(model).__name__}.forward', rest)
    tokens = known.get('inputs_embeds') if known.get('input_ids') is None else known['input_ids']
    cache = known.get('past_key_values')
    check_layers(cache, model.layers)
    if tokens is not None:
        has_attention = getattr(model.config, 'attn', None) is not None
        known['attention_mask'], rest = resolve_call(rest, known.get('attention_mask'), tokens, cache, has_attention)
    model._paused = pause_checkpointing(model, cache)
    use_cache = known.get('use_cache')
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    if use_cache and cache is None:
        known['past_key_values'] = RewindableCache()
    elif not use_cache and cache is not None:
        # fla's attention and feed-forward layers always update what they are given
        known['past_key_values'] = look_ahead(cache)
        known['past_key_values'].looks_ahead_of = cache
    return (), {**known, **rest}


def after_forward(model: nn.Module, args: tuple, output: Any) -> Any:
    """Hand back the cache that was given, not the copy that was looked ahead in; an error leaves no output."""
    resume_checkpointing(vars(model).pop('_paused', ()))
    if output is None:
        return None
    if isinstance(output, tuple):
        return tuple(getattr(x, 'looks_ahead_of', x) for x in output)
    if output.past_key_values is not None:
        output.past_key_values = getattr(output.past_key_values, 'looks_ahead_of', output.past_key_values)
    return output


@dataclass
class ShiftedLabels:
    """Labels on their way through a family's `forward`, which knows no others than `labels`, to the loss."""

    labels: torch.Tensor


def with_shift_labels(forward: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A family's `forward` of a causal language model, with `shift_labels` `[B, T]`, which win over `labels`."""
    if (shift_labels := kwargs.pop('shift_labels', None)) is not None:
        kwargs['labels'] = ShiftedLabels(shift_labels)
    return forward(self, *args, **kwargs)


def logits_and_loss(self: nn.Module, hidden_states: torch.Tensor, labels: Any = None, *args: Any, **kwargs: Any) -> tuple:
    """The method of fla's models, by Longhorn's."""
    if isinstance(labels, ShiftedLabels):
        kwargs['shift_labels'], labels = labels.labels, None
    return compute_logits_and_loss(self, hidden_states, labels, *args, **kwargs)
