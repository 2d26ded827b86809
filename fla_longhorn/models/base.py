"""What Longhorn's models add to fla's: these stand for what `fla.models.modeling_utils` has under the same names."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from fla.models import modeling_utils
from fla.models.generation_utils import FLAGenerationMixin

from fla_longhorn.models.call import begin_call, end_call
from fla_longhorn.models.causal_lm import compute_logits_and_loss, with_shift_labels
from fla_longhorn.models.generation import (
    prepare_cache_for_generation,
    prepare_inputs_for_generation,
    refuse_continuous_batching,
    sample,
)
from fla_longhorn.modules.attention import RowwiseAttention, attention_options
from fla_longhorn.modules.cache import accept_cache

if TYPE_CHECKING:
    from fla.models.utils import Cache
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


def get_attention(config: Any, layer_idx: int) -> RowwiseAttention | None:
    """The attention of a layer in `config.attn`, else None."""
    options = attention_options(config, layer_idx)
    return None if options is None else RowwiseAttention(**options)


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
