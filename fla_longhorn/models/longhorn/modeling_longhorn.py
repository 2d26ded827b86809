"""Longhorn language models: a stack of mixers as in the paper, optionally with attention layers and MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.models.generation_utils import FLAGenerationMixin
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)

from fla_longhorn.layers.longhorn import Longhorn
from fla_longhorn.layers.weight_decay import no_weight_decay
from fla_longhorn.models.base import FLAForCausalLM, FLAModel, FLAPreTrainedModel, get_attention
from fla_longhorn.models.longhorn.configuration_longhorn import MIXER_OPTIONS, LonghornConfig
from fla_longhorn.modules import GatedMLP, RMSNorm

if TYPE_CHECKING:
    from fla.models.utils import Cache


class LonghornBlock(GradientCheckpointingLayer):
    """Pre-norm residual block: Longhorn, or attention in the layers of `config.attn`, then optionally fla's gated MLP."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        norm = RMSNorm if config.fuse_norm else nn.RMSNorm
        self.config = config
        self.layer_idx = layer_idx
        self.attn_norm = norm(config.hidden_size, eps=config.norm_eps)
        self.attn: Any = get_attention(config, layer_idx)
        is_attention = self.attn is not None
        if not is_attention:
            options = {name: getattr(config, name) for name in MIXER_OPTIONS}
            self.attn = Longhorn(mode=config.attn_mode, layer_idx=layer_idx, **options)
        ends = [self.attn.o_proj if is_attention else self.attn.out_proj]
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
        mixed, attentions, _ = self.attn(
            hidden_states=self.attn_norm(hidden_states), attention_mask=attention_mask, past_key_values=past_key_values,
            use_cache=use_cache, output_attentions=output_attentions, **kwargs,
        )
        hidden_states = hidden_states + mixed
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


class LonghornForCausalLM(LonghornPreTrainedModel, FLAForCausalLM, FLAGenerationMixin):
    """:class:`LonghornModel` with a language modelling head."""

    _tied_weights_keys = {'lm_head.weight': 'model.embeddings.weight'}
    accepts_loss_kwargs = True

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


# the losses of these two heads are means over a batch: `accepts_loss_kwargs` lets the Trainer divide them by the number of
# batches whose gradients it adds, not by their labels
class LonghornForSequenceClassification(GenericForSequenceClassification, LonghornPreTrainedModel):
    """Scores `[B, num_labels]` of each row's last token that is not `config.pad_token_id`, with padding on either side."""

    accepts_loss_kwargs = False


class LonghornForTokenClassification(GenericForTokenClassification, LonghornPreTrainedModel):
    """Scores `[B, T, num_labels]`."""

    accepts_loss_kwargs = False
