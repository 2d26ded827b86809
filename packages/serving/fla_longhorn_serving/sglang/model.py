"""The model of transformers on SGLang's flat batches, with each request's states in a slot of SGLang's pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from fla_longhorn.hosts import RewindableCache
from fla_longhorn.models import LonghornModel
from fla_longhorn_serving.sglang.config import ServedConfig


class LonghornForCausalLM(nn.Module):
    """:class:`fla_longhorn.LonghornForCausalLM` without attention layers, in one process.

    A step copies its requests' states out of their slots and back. SGLang zeroes a slot before it gives it to a request.
    """

    def __init__(self, config: ServedConfig, quant_config: Any = None, prefix: str = '') -> None:
        super().__init__()
        if quant_config is not None:
            raise ValueError(f'quantization must be None for Longhorn in SGLang, got {quant_config.get_name()}')
        self.config = config
        self.model = LonghornModel(config).requires_grad_(False).eval()
        self.lm_head: Any = self.model.embeddings
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix='lm_head')
        self.logits_processor = LogitsProcessor(config)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **kwargs: Any,
    ) -> LogitsProcessorOutput:
        backend = get_attn_backend()
        slots, pool = backend.forward_metadata.mamba_cache_indices, backend.req_to_token_pool
        layers = [pool.mamba2_layer_cache(i) for i in range(self.config.num_hidden_layers)]
        cache = RewindableCache()
        for i, layer in enumerate(layers):
            cache.update(layer_idx=i, recurrent_state=layer.temporal[slots], conv_state=layer.conv[0][slots])
        if forward_batch.forward_mode.is_decode():
            tokens, sequences = input_ids.unsqueeze(1), {}
        else:
            tokens, sequences = input_ids.unsqueeze(0), {'cu_seqlens': backend.forward_metadata.query_start_loc}
        output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **sequences)
        for i, layer in enumerate(layers):
            layer.temporal[slots], layer.conv[0][slots] = cache[i]['recurrent_state'], cache[i]['conv_state'].float()
        return self.logits_processor(input_ids, output.last_hidden_state.flatten(0, 1), self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, value in weights:
            parameter = parameters[name]
            getattr(parameter, 'weight_loader', default_weight_loader)(parameter, value)
            loaded.add(name)
        if missing := sorted(parameters.keys() - loaded - {'lm_head.weight'}):
            raise ValueError(f'the checkpoint must hold all parameters, but has no {missing}')
        return loaded


EntryClass = LonghornForCausalLM
