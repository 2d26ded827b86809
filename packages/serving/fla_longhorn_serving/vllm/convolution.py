"""The convolution of a piece of a batch: vLLM's kernels, or on a CPU our loop, five times as fast for 8 decoded tokens."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from fla_longhorn.hosts import find_loops
from fla_longhorn_serving.vllm.speculative import Pages


def convolve(
    x: torch.Tensor, pool: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, pages: Pages,
    sequences: dict[str, torch.Tensor] | None, metadata: Any,
) -> torch.Tensor:
    """The outputs `[T, channels]` for `x` of that shape, of prompts if `sequences` has their boundaries, else one token each.

    The last inputs, pages `[taps - 1, channels]` of `pool`, are read in the first of `pages` and written in the second.
    """
    before, after = pages
    loops: Any = find_loops()
    loops = None if loops is None else loops.of_modules(x.new_empty(0), taps, bias)
    if loops is not None and loops.has_pages(x, pool, taps, bias):
        first = listed(before)
        last = first if after is before else listed(after)
        bounds = None
        if sequences is not None:
            bounds, filled = sequences['cu_seqlens'], sequences['has_initial_state'].tolist()
            first = [row if some else -1 for row, some in zip(first, filled, strict=True)]
        return loops.convolve_in_pages(x, pool, taps, bias, True, first, last, bounds)
    states = pool.transpose(1, 2)
    if after is not before:
        states[after] = states[before]
    if sequences is None:
        return causal_conv1d_update(x, states, taps, bias, 'silu', conv_state_indices=after)
    return causal_conv1d_fn(
        x.transpose(0, 1), taps, bias, activation='silu', conv_states=states, cache_indices=after,
        has_initial_state=sequences['has_initial_state'], query_start_loc=sequences['cu_seqlens'], metadata=metadata,
    ).transpose(0, 1).contiguous()


def listed(pages: torch.Tensor) -> list[int]:
    return [-1 if page == NULL_BLOCK_ID else page for page in pages.tolist()]
