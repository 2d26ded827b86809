"""`flash_attn`'s two functions by PyTorch's `scaled_dot_product_attention`, for machines without that package.

fla's `Attention` raises `ImportError` if `flash_attn` cannot be imported. fla's modules can use these functions instead. No
module named `flash_attn` is created, because other packages look for one. The functions run on any device and in any
floating-point dtype, and keep the dtype.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from fla_longhorn.ops.last_read import LastRead

# shared by the layers of a model
_last_queries, _last_keys = LastRead(), LastRead()
# the modules of fla that import the two functions and need nothing else of the package
MODULES = (
    'fla.layers.attn',
    'fla.layers.bitattn',
    'fla.layers.mla',
    'fla.layers.rodimus',
    'fla.ops.deltaformer.parallel',
    'fla.ops.nsa.naive',
    'fla.ops.nsa.parallel',
)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    r"""Softmax attention, `softmax(softmax_scale * q k^T) v` over the keys that a query sees.

    The last query is at the position of the last key. A query at position `i` sees the keys from `i - window_size[0]` to
    `i + window_size[1]`, -1 meaning no bound, and with `causal` none after `i`; a query that sees no key gets zeros.

    Args:
        q (torch.Tensor):
            Queries of shape `[B, T, HQ, K]`.
        k (torch.Tensor):
            Keys of shape `[B, S, H, K]`; `H` divides `HQ`, and consecutive query heads share a key head.
        v (torch.Tensor):
            Values of shape `[B, S, H, V]`.
        dropout_p (float, Optional):
            Probability of dropping a weight. Default: 0.
        softmax_scale (float, Optional):
            Factor of the scores; `None` is `K ** -0.5`. Default: `None`.
        causal (bool, Optional):
            Whether a query sees no later key. Default: `False`.
        window_size (tuple[int, int], Optional):
            Keys seen before and after a query. Default: `(-1, -1)`, all.
        deterministic (bool, Optional):
            Accepted and ignored: there is only one algorithm. Default: `False`.

    Returns:
        torch.Tensor:
            Output of shape `[B, T, HQ, V]` in the dtype of `q`.

    Raises:
        NotImplementedError: `softcap`, `alibi_slopes` or `return_attn_probs` is given.
    """
    _refuse(softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    T, S = q.shape[1], k.shape[1]
    if S == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    left, right = window_size[0], 0 if causal else window_size[1]
    triangle = left < 0 and right == 0 and T == S
    mask, blind = None, None
    # neither the triangle nor a query that sees every key needs a mask, which would rule out the faster kernels
    if not triangle and (left >= 0 or right > 0 or (right == 0 and T > 1)):
        mask = _visible(T, S, left, right, q.device)
        if T > S:
            # a row without a key would be 0/0, forward and backward
            blind = ~mask.any(-1)
            mask |= blind[:, None]
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=triangle,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)
    if blind is not None:
        o = o.masked_fill(blind[:, None, None], 0)
    return o.to(q.dtype)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`flash_attn_func` on packed sequences.

    Args:
        q, k, v (torch.Tensor):
            All sequences one after the other, `[T, HQ, K]`, `[S, H, K]` and `[S, H, V]`.
        cu_seqlens_q, cu_seqlens_k (torch.Tensor):
            Their boundaries `[N + 1]` among the queries and among the keys.
        max_seqlen_q, max_seqlen_k (int, Optional):
            Accepted and ignored.

    Returns:
        torch.Tensor:
            Output of shape `[T, HQ, V]` in the dtype of `q`.

    Raises:
        NotImplementedError: `softcap`, `alibi_slopes`, `return_attn_probs` or `block_table` is given.
    """
    _refuse(block_table=block_table)
    bounds = _last_queries.values(cu_seqlens_q), _last_keys.values(cu_seqlens_k)
    lengths_q, lengths_k = ([b - a for a, b in pairwise(x)] for x in bounds)
    sequences = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    return torch.cat([
        flash_attn_func(
            q_row[None],
            k_row[None],
            v_row[None],
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            return_attn_probs=return_attn_probs,
        )[0]
        for q_row, k_row, v_row in sequences
    ])


def _visible(T: int, S: int, left: int, right: int, device: torch.device) -> torch.Tensor:
    """Which keys `[T, S]` the queries see."""
    keys = torch.arange(S, dtype=torch.int64, device=device)
    ahead = keys - torch.arange(S - T, S, dtype=torch.int64, device=device)[:, None]
    mask = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        mask &= ahead >= -left
    if right >= 0:
        mask &= ahead <= right
    return mask


def _refuse(**options) -> None:
    for name, value in options.items():
        if isinstance(value, torch.Tensor) or value:
            raise NotImplementedError(f'{name} needs the flash_attn package; PyTorch attention in its place has none')
