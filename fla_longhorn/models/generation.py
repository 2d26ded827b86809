"""Methods for `generate`, of Longhorn's models and of fla's families with Longhorn as their mixer."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers.generation import GenerationMixin

from fla_longhorn.modules.cache import CACHE, check_cache
from fla_longhorn.modules.rewind import RewindableCache


def prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
    """transformers' method of this name, with a cache that assisted generation can crop."""
    check_cache(model_kwargs.get(CACHE))
    result = GenerationMixin._prepare_cache_for_generation(self, generation_config, model_kwargs, *args)
    if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
        model_kwargs[CACHE] = RewindableCache()
        if getattr(generation_config, 'is_assistant', False):
            model_kwargs[CACHE].activate_past_recording()
    return result


# `generate` looks for `inputs_embeds` in the signature
@wraps(GenerationMixin.prepare_inputs_for_generation)
def prepare_inputs_for_generation(
    self: Any, input_ids: torch.LongTensor, next_sequence_length: int | None = None, is_first_iteration: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """transformers' method of this name, without a mask for the tokens that `generate` appends, which are not padding.

    fla's, in between, knows the cache by its old name only.
    """
    inputs = GenerationMixin.prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs,
    )
    # attention layers need the mask of the tokens before
    if next_sequence_length == 1 and not is_first_iteration and getattr(self.config, 'attn', None) is None:
        inputs['attention_mask'] = None
    return inputs


def refuse_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' entry to `generate_batch`."""
    raise NotImplementedError(
        f'generate_batch, transformers\' continuous batching, pages the keys of attention, and {type(self).__name__} keeps '
        'recurrent states: call generate with a batch that is padded on the left and its attention_mask'
    )
