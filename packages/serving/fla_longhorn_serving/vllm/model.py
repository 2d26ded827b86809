"""Longhorn's models in vLLM.

The parameters have the names of :class:`fla_longhorn.LonghornForCausalLM`, but for those that vLLM puts together.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from fla.models.configuration_utils import get_attention_spec
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    IsHybrid,
    SupportsLoRA,
    SupportsMambaPrefixCaching,
    SupportsPP,
)
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from fla_longhorn_serving.vllm.attention import LonghornAttention
from fla_longhorn_serving.vllm.mixer import LonghornMixer, state_dtype, state_shape


class LonghornMLP(nn.Module):
    """fla's gated MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        if config.hidden_act != 'swish':
            raise ValueError(f"hidden_act must be 'swish' for vLLM, got {config.hidden_act!r}")
        size = config.intermediate_size
        if size is None:
            # fla's GatedMLP rounds up to the same multiple
            size = -(-int(config.hidden_size * config.hidden_ratio * 2 / 3) // 256) * 256
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [size] * 2, bias=False, quant_config=quant, prefix=f'{prefix}.gate_up_proj',
        )
        self.down_proj = RowParallelLinear(
            size, config.hidden_size, bias=False, quant_config=quant, prefix=f'{prefix}.down_proj',
        )
        self.act = SiluAndMul()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_up_proj(hidden_states)[0]))[0]


class LonghornBlock(nn.Module):
    """Longhorn, or attention in the layers of `config.attn`, then the MLP if there is one."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        spec = get_attention_spec(config.attn, layer_idx=extract_layer_index(prefix))
        self.has_mlp = config.hidden_ratio is not None or config.intermediate_size is not None
        self.has_attention = spec is not None
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        if spec is None:
            self.attn: nn.Module = LonghornMixer(vllm_config, prefix=f'{prefix}.attn')
        else:
            self.attn = LonghornAttention(vllm_config, spec, prefix=f'{prefix}.attn')
        if self.has_mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = LonghornMLP(vllm_config, prefix=f'{prefix}.mlp')

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden_states = hidden_states, self.attn_norm(hidden_states)
        else:
            hidden_states, residual = self.attn_norm(hidden_states, residual)
        hidden_states = self.attn(hidden_states, positions) if self.has_attention else self.attn(hidden_states)
        if self.has_mlp:
            hidden_states, residual = self.mlp_norm(hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


@support_torch_compile(dynamic_arg_dims={'input_ids': 0, 'positions': -1, 'intermediate_tensors': 0, 'inputs_embeds': 0})
class LonghornModel(nn.Module):
    """Embeddings, blocks and a final norm; under pipeline parallelism, this rank's blocks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = '') -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers, lambda prefix: LonghornBlock(vllm_config, prefix), prefix=f'{prefix}.layers',
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if intermediate_tensors is None:
            hidden_states, residual = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds, None
        else:
            hidden_states, residual = intermediate_tensors['hidden_states'], intermediate_tensors['residual']
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(hidden_states, residual, positions)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({'hidden_states': hidden_states, 'residual': residual})
        return self.norm(hidden_states, residual)[0]


class LonghornBase(nn.Module, HasInnerState, SupportsLoRA, SupportsPP, SupportsMambaPrefixCaching):
    """A language model, whether it has attention layers or not."""

    # an adapter of `in_proj` is one, though vLLM's layer has two parts
    packed_modules_mapping = {
        'gate_up_proj': ['gate_proj', 'up_proj'], 'qkv_proj': ['q_proj', 'k_proj', 'v_proj'], 'in_proj': ['in_proj'],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = '') -> None:
        super().__init__()
        # vLLM's classifiers and adapters read `config`
        self.config = config = vllm_config.model_config.hf_config
        stacked: dict[str, tuple[str, int | str]] = {'.gate_proj': ('.gate_up_proj', 0), '.up_proj': ('.gate_up_proj', 1)}
        for i in range(config.num_hidden_layers):
            # in the other layers `v_proj` is a projection of its own
            if get_attention_spec(config.attn, layer_idx=i) is not None:
                stacked |= {f'layers.{i}.attn.{x}_proj': (f'layers.{i}.attn.qkv_proj', x) for x in 'qkv'}
        self.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=stacked)
        self.model = LonghornModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, 'model'))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, 'lm_head'))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embeddings)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ['hidden_states', 'residual'], config.hidden_size,
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embeddings(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
        return state_dtype(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return state_shape(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, MambaStateCopyFunc]:
        return MambaStateCopyFuncCalculator.mamba1_state_copy_func()


class LonghornForCausalLM(LonghornBase, IsAttentionFree):
    """The paper's architecture, without attention layers: a request needs a page, however long it is."""


class LonghornHybridForCausalLM(LonghornBase, IsHybrid):
    """With the attention layers of `config.attn`."""
