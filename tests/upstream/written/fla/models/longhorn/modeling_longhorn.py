from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from fla.layers.longhorn import Longhorn
from fla.models.generation_utils import FLAUnsupportedCacheGenerationMixin
from fla.models.longhorn.configuration_longhorn import LonghornConfig
from fla.models.modeling_utils import FLAForCausalLM, FLAModel, FLAPreTrainedModel, get_attention
from fla.modules import GatedMLP as LonghornMLP
from fla.modules import RMSNorm
from transformers.modeling_layers import GradientCheckpointingLayer

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.processing_utils import Unpack


class LonghornBlock(GradientCheckpointingLayer):

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()

        self.config = config
        self.layer_idx = layer_idx

        self.attn_norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)
        self.attn = get_attention(config=config, layer_idx=layer_idx)
        if self.attn is None:
            self.attn = Longhorn(
                mode=config.attn_mode,
                hidden_size=config.hidden_size,
                state_size=config.state_size,
                expand=config.expand,
                num_heads=config.num_heads,
                conv_size=config.conv_size,
                conv_bias=config.conv_bias,
                beta_rank=config.beta_rank,
                use_bias=config.use_bias,
                exact=config.exact,
                allow_neg_eigval=config.allow_neg_eigval,
                gate=config.gate,
                layer_idx=layer_idx,
            )
        self.mlp = None
        if config.hidden_ratio is not None or config.intermediate_size is not None:
            self.mlp_norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)
            self.mlp = LonghornMLP(
                hidden_size=config.hidden_size,
                hidden_ratio=config.hidden_ratio,
                intermediate_size=config.intermediate_size,
                hidden_act=config.hidden_act,
                fuse_swiglu=config.fuse_swiglu,
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | list[torch.FloatTensor] | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        attnres_states: list[torch.Tensor] | None = None,
        **kwargs: Unpack[dict],
    ) -> tuple[torch.FloatTensor, tuple[torch.FloatTensor, torch.FloatTensor] | None]:
        residual = hidden_states
        hidden_states, attentions, past_key_values = self.attn(
            hidden_states=self.attn_norm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states), **kwargs)
        return hidden_states, attentions, past_key_values, attnres_states


class LonghornPreTrainedModel(FLAPreTrainedModel):

    config_class = LonghornConfig
    base_model_prefix = 'model'
    supports_gradient_checkpointing = True
    _no_split_modules = ['LonghornBlock']
    _supports_cache_class = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Longhorn):
            nn.init.ones_(module.D)


class LonghornModel(LonghornPreTrainedModel, FLAModel):

    use_attnres = False

    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([LonghornBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = (RMSNorm if config.fuse_norm else nn.RMSNorm)(config.hidden_size, eps=config.norm_eps)

        self.gradient_checkpointing = False

        self.post_init()


class LonghornForCausalLM(LonghornPreTrainedModel, FLAForCausalLM, FLAUnsupportedCacheGenerationMixin):

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = LonghornModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion = None

        # Initialize weights and apply final processing
        self.post_init()
