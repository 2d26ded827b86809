"""`flash_attn`'s two functions by PyTorch's `scaled_dot_product_attention`, for hybrid models without that package."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from fla_longhorn.ops.last_read import LastRead

# shared by the layers of a model
_last_queries, _last_keys = LastRead(), LastRead()


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Softmax attention `[B, T, HQ, V]` of queries `[B, T, HQ, K]`, keys `[B, S, H, K]` and values `[B, S, H, V]`, S >= T.

    The last query is at the position of the last key. A query at position i sees the keys from `i - window_size[0]` to
    `i + window_size[1]`, -1 meaning no bound, and with `causal` none after i.
    """
    T, S = q.shape[1], k.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    # a trace of torch.jit has tensors for sizes
    triangle = left < 0 and right == 0 and bool(T == S)
    mask = None
    # neither the triangle nor a query that sees every key needs a mask, which would rule out the faster kernels
    if not triangle and (left >= 0 or right > 0 or (right == 0 and T > 1)):
        keys = torch.arange(S, dtype=torch.int64, device=q.device)
        ahead = keys - torch.arange(S - T, S, dtype=torch.int64, device=q.device)[:, None]
        mask = (ahead >= (-left if left >= 0 else -S)) & (ahead <= (right if right >= 0 else S))
    return F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=triangle, scale=softmax_scale,
        enable_gqa=bool(q.shape[2] != k.shape[2]),
    ).transpose(1, 2).to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **options: Any,
) -> torch.Tensor:
    """:func:`flash_attn_func` on packed sequences, `[T, HQ, K]`, `[S, H, K]` and `[S, H, V]`, with boundaries `[N + 1]`."""
    bounds = _last_queries.values(cu_seqlens_q), _last_keys.values(cu_seqlens_k)
    parts = (x.split([b - a for a, b in pairwise(of)]) for x, of in ((q, bounds[0]), (k, bounds[1]), (v, bounds[1])))
    return torch.cat([
        flash_attn_func(*(x[None] for x in sequence), **options)[0] for sequence in zip(*parts, strict=True)
    ])
