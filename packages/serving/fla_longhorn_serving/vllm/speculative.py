"""Where the states of speculative decoding are, so that rejected drafts leave no trace.

A request has one page more than drafts in a step. Its state after n tokens is in page n modulo their number: a step writes the
state after each draft to a page of its own, and the next step starts from the page of the tokens that were kept. vLLM counts
those tokens for every model, but says how many drafts were accepted only to the layers that it knows (vLLM 0.32,
`v1/worker/gpu_model_runner.py`, lines 2461 to 2478 and 1555).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba1_attn import (
    Mamba1AttentionBackend,
    Mamba1AttentionMetadata,
    Mamba1AttentionMetadataBuilder,
)

Pages = tuple[torch.Tensor, torch.Tensor]


@dataclass
class DraftMetadata(Mamba1AttentionMetadata):
    # the decoding requests' first tokens, their second ones, and so on: places in the batch, and pages before and after
    steps: list[tuple[torch.Tensor, Pages]] = field(default_factory=list)
    # pages of the prompts' states before and after the batch
    pages_p: Pages | None = None


class DraftMetadataBuilder(Mamba1AttentionMetadataBuilder):
    metadata_cls = DraftMetadata
    # these pages are new tensors, which a graph of the whole model would not read
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False, **kwargs: Any,
    ) -> DraftMetadata:
        batch, pages = common_attn_metadata, 1 + self.num_spec_tokens
        # if it is given counts, whatever they are, vLLM takes requests with drafts for decoding ones
        metadata = self._compute_common_metadata(batch, num_accepted_tokens=batch.seq_lens)
        decoded, lengths = metadata.num_decodes, batch.query_start_loc_cpu.diff()
        if (~batch.is_prefilling[decoded:] & (lengths[decoded:] <= pages)).any():
            raise RuntimeError('internal error: requests with drafts must come before prompts in a batch')
        first, last = batch.seq_lens - batch.query_start_loc.diff(), batch.seq_lens

        def page(requests: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return batch.block_table_tensor[requests, tokens[requests] % pages]

        for i in range(int(lengths[:decoded].max()) if decoded else 0):
            found = (lengths[:decoded] > i).nonzero()[:, 0].to(first.device)
            places = batch.query_start_loc[found] + i
            metadata.steps.append((places, (page(found, first + i), page(found, first + i + 1))))
        if metadata.num_prefills:
            rest = torch.arange(decoded, metadata.num_reqs, dtype=torch.int64, device=first.device)
            metadata.pages_p = page(rest, first), page(rest, last)
        return metadata


class DraftBackend(Mamba1AttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[DraftMetadataBuilder]:
        return DraftMetadataBuilder
