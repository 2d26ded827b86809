"""Gram matrices of the chunks, shared by all channels of a head: one small kernel before forward and before backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import num_checkpoints
from fla_longhorn.ops.triton.common import FUSED, decays
from fla_longhorn.ops.triton.exact.common import Strides, head_and_index, load_tile, padded, product
from fla_longhorn.ops.triton.exact.configs import chunk_size
from fla_longhorn.ops.triton.launch import LaunchKey
from fla_longhorn.ops.triton.slots import locate_slot


@triton.jit
def decays_between(b_g):
    """`e^(g_{r+1} + ... + g_t)` at `[t, r]`, zero for t < r, of the logarithms `[BT]`: sums of one sign, of any size."""
    o_t = tl.arange(0, b_g.shape[0])
    later = o_t[:, None] > o_t[None, :]
    b_sum = tl.cumsum(tl.where(later, b_g.to(tl.float32)[:, None], 0.0), 0)
    return tl.where(o_t[:, None] >= o_t[None, :], decays(b_sum), 0.0)


@triton.jit
def gram_pointers(gram, a, i_gram, BT: tl.constexpr):
    """Addresses of what the gram kernel wrote for chunk `i_gram`."""
    return gram + i_gram * ((BT + 1) * BT), a + i_gram * (2 * BT * BT)


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_kernel_gram(
    q,
    k,
    gram,
    a,
    cu_seqlens,
    scale,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Store `G = K K^T`, its diagonal as row BT, and `A^T` and A, with `A = tril(scale Q K^T)`."""
    i_h, i_c = head_and_index(H)
    _, bos, T_n, i_t = locate_slot(cu_seqlens, i_c, T, N, BT, cu_seqlens is not None)
    left = T_n - i_t
    BK: tl.constexpr = padded(K)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    # [BT, BK]
    b_q = load_tile(q + i_h * K, S.q, bos + i_t, o_t, o_k, left, K).to(tl.float32)
    b_k = load_tile(k + i_h * K, S.k, bos + i_t, o_t, o_k, left, K).to(tl.float32)
    # [BT, BT], rows are keys
    b_zero = tl.zeros([BT, BT], dtype=tl.float32)
    b_gram = product(b_k, tl.trans(b_k), b_zero, DOT)
    b_a = product(b_k, tl.trans(b_q), b_zero, DOT)
    if scale is not None:
        b_a *= scale
    b_a = tl.where(o_t[:, None] <= o_t[None, :], b_a, 0.0)

    o_g = o_t[:, None] * BT + o_t[None, :]
    p_gram, p_a = gram_pointers(gram, a, i_c.to(tl.int64) * H + i_h, BT)
    # sums of one term: others may differ between lanes in their last bit, and all lanes store them
    tl.store(p_gram + BT * BT + o_t, tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_gram, 0.0), 1))
    tl.store(p_gram + o_g, b_gram)
    tl.store(p_a + o_g, b_a)
    tl.store(p_a + BT * BT + o_g, tl.trans(b_a))


def chunk_longhorn_exact_gram(
    args: Arguments, strides: Strides, key: LaunchKey, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gram [slots, H, C + 1, C]` and `a [slots, H, 2, C, C]` in float32."""
    q, k, cu_seqlens = args.q, args.k, args.cu_seqlens
    B, T, H, K = q.shape
    N, BT = args.num_sequences, chunk_size(key)
    slots = num_checkpoints(B, T, N, BT, cu_seqlens is not None)
    gram = q.new_empty((slots, H, BT + 1, BT), dtype=torch.float32)
    a = q.new_empty((slots, H, 2, BT, BT), dtype=torch.float32)
    chunk_longhorn_exact_kernel_gram[(H * slots,)](
        q=q,
        k=k,
        gram=gram,
        a=a,
        cu_seqlens=cu_seqlens,
        scale=scale,
        T=T,
        N=N,
        H=H,
        K=K,
        S=strides,
        BT=BT,
        DOT=key.precision,
        num_warps=1,
        **FUSED,
    )
    return gram, a
