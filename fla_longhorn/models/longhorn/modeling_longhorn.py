"""Longhorn language models: a stack of mixers as in the paper, optionally with attention layers and MLPs."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.layers.attn import Attention
from fla.models.generation_utils import FLAGenerationMixin
from fla.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fla_longhorn.layers.gate import no_weight_decay
from fla_longhorn.layers.longhorn import Longhorn
from fla_longhorn.models.call import begin_call, end_call
from fla_longhorn.models.causal_lm import compute_logits_and_loss, with_shift_labels
from fla_longhorn.models.generation import (
    prepare_cache_for_generation,
    prepare_inputs_for_generation,
    refuse_continuous_batching,
    sample,
)
from fla_longhorn.models.longhorn.configuration_longhorn import MIXER_OPTIONS, LonghornConfig
from fla_longhorn.modules import GatedMLP, RMSNorm
from fla_longhorn.modules.attention import RowwiseAttention, attention_options
from fla_longhorn.modules.cache import accept_cache, look_ahead

if TYPE_CHECKING:
    from fla.models.utils import Cache
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class LonghornBlock(GradientCheckpointingLayer):
    """Pre-norm residual block: Longhorn, or attention in the layers of `config.attn`, then optionally fla's gated MLP."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        norm = RMSNorm if config.fuse_norm else nn.RMSNorm
        self.config = config
        self.layer_idx = layer_idx
        self.attn_norm = norm(config.hidden_size, eps=config.norm_eps)
        attention = attention_options(config, layer_idx)
        if attention is None:
            options = {name: getattr(config, name) for name in MIXER_OPTIONS}
            self.attn = Longhorn(mode=config.attn_mode, layer_idx=layer_idx, **options)
        else:
            self.attn = RowwiseAttention(**attention)
        ends: list[Any] = [self.attn.out_proj if attention is None else self.attn.o_proj]
        self.has_mlp = config.has_mlp
        if self.has_mlp:
            self.mlp_norm = norm(config.hidden_size, eps=config.norm_eps)
            names = ('hidden_size', 'hidden_ratio', 'intermediate_size', 'hidden_act', 'fuse_swiglu')
            self.mlp = GatedMLP(**{name: getattr(config, name) for name in names})
            ends.append(self.mlp.down_proj)
        for projection in ends:
            # `_init_weights` reads it; transformers does not call that for a module without own parameters, such as the MLP
            projection.ends_residual_branch = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        attnres_states: list[torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Cache | None, list[torch.Tensor] | None]:
        residual, cache, attn = hidden_states, past_key_values, self.attn
        if isinstance(attn, Attention) and not use_cache:
            # fla's attention updates any cache that it gets
            cache = look_ahead(cache)
        hidden_states, attentions, _ = attn(
            hidden_states=self.attn_norm(hidden_states), attention_mask=attention_mask, past_key_values=cache,
            use_cache=use_cache, output_attentions=output_attentions, **kwargs,
        )
        hidden_states = residual + hidden_states
        if self.has_mlp:
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states), **kwargs)
        return hidden_states, attentions, past_key_values, attnres_states


class LonghornPreTrainedModel(FLAPreTrainedModel):
    """Initialisation as in the authors' code, of a fresh model, one on `meta`, or one partly loaded."""

    config_class = LonghornConfig
    base_model_prefix = 'model'
    supports_gradient_checkpointing = True
    # tells the Trainer that a head's loss is a mean, not divided by `num_items_in_batch`
    accepts_loss_kwargs = False
    _no_split_modules = ['LonghornBlock']

    @classmethod
    def prepare_distribute_model(cls, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' method; its pipeline parallelism needs blocks that return a tensor."""
        own = isinstance(distributed_config, dict)
        pp_size = distributed_config.get('pp_size') if own else getattr(distributed_config, 'pp_size', None)
        if (pp_size or 1) > 1:
            raise ValueError(
                f"pp_size must be 1 for Longhorn's models, whose blocks return more than the hidden states, got {pp_size}: "
                'build stages for torch.distributed.pipelining'
            )
        return super().prepare_distribute_model(distributed_config, *args, **kwargs)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay."""
        return no_weight_decay(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            module.reset_parameters()
            if isinstance(module, nn.Linear):
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
                if getattr(module, 'ends_residual_branch', False):
                    # PyTorch's default, uniform in +-1/sqrt(fan_in), over the square root of the number of residual branches
                    branches = self.config.num_hidden_layers * (2 if self.config.has_mlp else 1)
                    bound = (module.in_features * branches) ** -0.5
                    nn.init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, Longhorn):
            nn.init.ones_(module.D)
        elif callable(reset_parameters := getattr(module, 'reset_parameters', None)):
            reset_parameters()


class LonghornModel(LonghornPreTrainedModel, FLAModel):
    """Embeddings, Longhorn blocks and a final norm."""

    use_attnres = False

    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(LonghornBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

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


class LonghornForCausalLM(LonghornPreTrainedModel, FLAForCausalLM, FLAGenerationMixin):
    """:class:`LonghornModel` with a language modelling head.

    Called as fla's models, and with labels that are already shifted, `shift_labels` `[B, T]`, which win over `labels`.
    """

    _tied_weights_keys = {'lm_head.weight': 'model.embeddings.weight'}
    accepts_loss_kwargs = True
    # assisted generation can revert its states
    _is_stateful = False
    _compute_logits_and_loss = compute_logits_and_loss
    _prepare_cache_for_generation = prepare_cache_for_generation
    prepare_inputs_for_generation = prepare_inputs_for_generation
    _sample = sample
    init_continuous_batching = refuse_continuous_batching

    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        self.model = LonghornModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # a tied head gets the embeddings' initialisation; FSDP2 ties it on `meta`, before this
        if module is not self.lm_head or module.weight is not self.model.embeddings.weight:
            super()._init_weights(module)

    # `shift_labels` must not be in the signature: the Trainer takes arguments named `*label*` for columns of every batch
    @wraps(FLAForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> tuple | CausalLMOutputWithPast:
        return with_shift_labels(FLAForCausalLM.forward, self, *args, **kwargs)
