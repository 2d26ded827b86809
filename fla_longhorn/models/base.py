"""What Longhorn's models add to fla's: classes that stand for what `fla.models.modeling_utils` has under the same names.

Their methods for `generate` are those of fla's families with Longhorn as their mixer too.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import torch
from fla.models import modeling_utils
from fla.models.generation_utils import FLAGenerationMixin
from transformers.generation import GenerationMixin, StoppingCriteriaList

from fla_longhorn.models.call import begin_call, end_call
from fla_longhorn.models.causal_lm import compute_logits_and_loss, with_shift_labels
from fla_longhorn.modules.attention import RowwiseAttention, attention_options
from fla_longhorn.modules.cache import CACHE, RewindableCache, accept_cache, check_cache

if TYPE_CHECKING:
    from fla.models.utils import Cache
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

# a length that no row reaches
NEVER = 2**62


class Ended(StoppingCriteriaList):
    """Criteria that keep the length at which each row has ended, from where `generate` appends padding to it."""

    ends: torch.Tensor | None = None
    some: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        done = super().__call__(input_ids, scores, **kwargs)
        ends = torch.where(done, input_ids.shape[1], NEVER)
        self.ends = ends if self.ends is None else torch.minimum(self.ends, ends)
        # complete when `generate` has read whether all rows have ended, for which it waits anyway
        self.some = (self.ends < NEVER).any().to('cpu', non_blocking=True)
        return done

    def mask(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The mask of a call, with zeros for what was appended to rows that had ended."""
        mask = torch.ones_like(input_ids) if mask is None else mask
        first = input_ids.shape[1] - mask.shape[1]
        columns = torch.arange(first, input_ids.shape[1], dtype=torch.int64, device=mask.device)
        return mask if self.ends is None else mask * (columns < self.ends[:, None])


def sample(self: Any, input_ids: torch.LongTensor, *, stopping_criteria: StoppingCriteriaList, **kwargs: Any) -> Any:
    """transformers' `_sample`, in which a row that has ended reads no padding, so that a cache may be continued."""
    if len(input_ids) > 1 and any(hasattr(x, 'eos_token_id') for x in stopping_criteria):
        kwargs['ended'] = stopping_criteria = Ended(stopping_criteria)
    return GenerationMixin._sample(self, input_ids, stopping_criteria=stopping_criteria, **kwargs)


def prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
    """transformers' method of this name, with a cache that assisted generation can crop."""
    check_cache(model_kwargs.get(CACHE))
    if self.training and self.is_gradient_checkpointing and generation_config.use_cache is not False:
        warnings.warn('use_cache=True is set to False with gradient checkpointing in training', stacklevel=2)
        generation_config.use_cache = False
    result = GenerationMixin._prepare_cache_for_generation(self, generation_config, model_kwargs, *args)
    if generation_config.use_cache is False:
        return result
    if model_kwargs.get(CACHE) is None:
        model_kwargs[CACHE] = RewindableCache()
    if isinstance(cache := model_kwargs[CACHE], RewindableCache):
        cache.holds_guesses = cache.record_past = bool(getattr(generation_config, 'is_assistant', False))
    return result


# `generate` looks for `inputs_embeds` in the signature
@wraps(GenerationMixin.prepare_inputs_for_generation)
def prepare_inputs_for_generation(
    self: Any, input_ids: torch.LongTensor, next_sequence_length: int | None = None, is_first_iteration: bool = False,
    attention_mask: torch.Tensor | None = None, ended: Ended | None = None, **kwargs: Any,
) -> dict[str, Any]:
    """transformers' method of this name, without a mask for the tokens that `generate` appends, which are not padding.

    fla's, in between, knows the cache by its old name only.
    """
    cache: Any = kwargs.get(CACHE)
    one = next_sequence_length == 1 and not is_first_iteration
    if getattr(cache, 'missing', 0):
        # a crop inside a call: what it kept is read again
        next_sequence_length, cache.missing = input_ids.shape[1] - cache.get_seq_length(), 0
    if ended is not None and ended.some is not None and ended.some:
        attention_mask = ended.mask(input_ids, attention_mask)
    elif one and self.config.model_type == 'longhorn' and self.config.attn is None:
        # layers of attention, which some families have always, need the mask of the tokens before
        attention_mask = None
    return GenerationMixin.prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration,
        attention_mask=cast(Any, attention_mask), **kwargs,
    )


def refuse_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' entry to `generate_batch`."""
    raise NotImplementedError(
        f'generate_batch, transformers\' continuous batching, pages the keys of attention, and {type(self).__name__} keeps '
        'recurrent states: call generate with a batch that is padded on the left and its attention_mask'
    )


def get_attention(config: Any, layer_idx: int) -> RowwiseAttention | None:
    """The attention of a layer in `config.attn`, else None."""
    options = attention_options(config, layer_idx)
    return None if options is None else RowwiseAttention(**options)


class FLAPreTrainedModel(modeling_utils.FLAPreTrainedModel):
    """Warns where transformers would load a model wrongly."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """transformers' method; warns where Auto classes took this class for a subclass that saved its own code."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        own = [name for auto, name in (getattr(model.config, 'auto_map', None) or {}).items() if auto.startswith('AutoModel')]
        if own and cls.__name__ not in {name.rpartition('.')[2] for name in own}:
            warnings.warn(
                f'the checkpoint is of {own[0]}, but {cls.__name__} was loaded: Auto classes take what is registered for '
                f'the model_type {model.config.model_type!r}, so call from_pretrained of the class itself, or give it a '
                'config class with a model_type of its own', stacklevel=2,
            )
        return loaded


class FLAModel(modeling_utils.FLAModel):
    """Checks a call once for all layers."""

    @accept_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        past_key_values: Cache | list[torch.FloatTensor] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> tuple | BaseModelOutputWithPast:
        """As fla's models; `kwargs` are those of :class:`fla_longhorn.layers.Longhorn`."""
        tokens = inputs_embeds if input_ids is None else input_ids
        attention_mask, past_key_values, use_cache, kwargs = begin_call(
            self, kwargs, attention_mask, tokens, past_key_values, use_cache,
        )
        output = super().forward(
            input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, output_attentions, output_hidden_states,
            return_dict, **kwargs,
        )
        if use_cache:
            end_call(past_key_values, attention_mask, output[0].shape[1], kwargs.get('rows'))
        return output


class FLAForCausalLM(modeling_utils.FLAForCausalLM, FLAGenerationMixin):
    """Called as fla's, and with labels that are already shifted, `shift_labels` `[B, T]`, which win over `labels`."""

    # assisted generation can revert its states
    _is_stateful = False
    _compute_logits_and_loss = compute_logits_and_loss
    _prepare_cache_for_generation = prepare_cache_for_generation
    prepare_inputs_for_generation = prepare_inputs_for_generation
    _sample = sample
    init_continuous_batching = refuse_continuous_batching

    # `shift_labels` must not be in the signature: the Trainer takes arguments named `*label*` for columns of every batch
    @wraps(modeling_utils.FLAForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> tuple | CausalLMOutputWithPast:
        return with_shift_labels(modeling_utils.FLAForCausalLM.forward, self, *args, **kwargs)
