"""Gram matrices of the chunks, shared by all channels of a head: one small kernel before forward and before backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import num_checkpoints
from fla_longhorn.ops.triton.common import FUSED, given
from fla_longhorn.ops.triton.exact.common import head_and_index, operand_dtype, product, rounded, tile_pointers
from fla_longhorn.ops.triton.exact.configs import CHUNK_SIZE, for_gram
from fla_longhorn.ops.triton.launch import LaunchKey
from fla_longhorn.ops.triton.slots import locate_slot


@triton.heuristics({'HAS_SCALE': lambda args: args['scale'] != 1.0, **given(IS_VARLEN='cu_seqlens')})
@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_kernel_gram(
    q, k, gram, a, cu_seqlens, scale, T, N,
    H: tl.constexpr, K: tl.constexpr, S_Q: tl.constexpr, S_K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    DOT: tl.constexpr, GATED: tl.constexpr, HAS_SCALE: tl.constexpr, IS_VARLEN: tl.constexpr,
):
    """Store `G = K K^T`, its diagonal in float32 as one more row, and `A^T` with `A = tril(scale Q K^T)`.

    Unless `DOT` is `ieee`, `A^T` is stored in two parts, so that it does not lose digits. With GATED it is float32, and A
    comes behind it.
    """
    i_h, i_c = head_and_index(H)
    _, bos, T_n, i_t = locate_slot(cu_seqlens, i_c, T, N, BT, IS_VARLEN)
    i_t = i_t.to(tl.int32)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    m_k = (i_t + o_t < T_n)[:, None] & (o_k < K)[None, :]
    # [BT, BK]
    b_q = tl.load(tile_pointers(q + i_h * K, S_Q, bos + i_t, o_t, o_k), mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(tile_pointers(k + i_h * K, S_K, bos + i_t, o_t, o_k), mask=m_k, other=0.0).to(tl.float32)
    # [BT, BT], rows are keys
    b_zero = tl.zeros([BT, BT], dtype=tl.float32)
    b_gram = product(b_k, tl.trans(b_k), b_zero, DOT)
    b_a = product(b_k, tl.trans(b_q), b_zero, DOT)
    if HAS_SCALE:
        b_a *= scale
    b_a = tl.where(o_t[:, None] <= o_t[None, :], b_a, 0.0)

    o_g = o_t[:, None] * BT + o_t[None, :]
    i_gram = i_c.to(tl.int64) * H + i_h
    p_gram = gram + i_gram * ((BT + 1) * BT)
    tl.store(p_gram + o_g, b_gram)
    # sums of one term: others may differ between lanes in their last bit, and all lanes store them
    tl.store(p_gram + BT * BT + o_t, tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_gram, 0.0), 1))
    if GATED:
        tl.store(a + i_gram * (2 * BT * BT) + o_g, b_a)
        tl.store(a + i_gram * (2 * BT * BT) + BT * BT + o_g, tl.trans(b_a))
    elif DOT == 'ieee':
        tl.store(a + i_gram * (BT * BT) + o_g, b_a)
    else:
        # rounded to nearest, because outputs use the first part alone
        b_hi = rounded(b_a, a.dtype.element_ty)
        b_lo = rounded(b_a - b_hi.to(tl.float32), a.dtype.element_ty)
        tl.store(a + i_gram * (2 * BT * BT) + o_g, b_hi)
        tl.store(a + i_gram * (2 * BT * BT) + BT * BT + o_g, b_lo)


def chunk_longhorn_exact_gram(
    args: Arguments, strides: dict[str, int], key: LaunchKey, scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gram [slots, H, C + 1, C]` float32 and `a [slots, H, 1 or 2, C, C]`, transposed."""
    q, k, cu_seqlens = args.q, args.k, args.cu_seqlens
    B, T, H, K = q.shape
    N, kernel, config, precision = args.num_sequences, chunk_longhorn_exact_kernel_gram, for_gram(key), key.precision
    slots = num_checkpoints(B, T, N, CHUNK_SIZE, cu_seqlens is not None)
    gram = q.new_empty((slots, H, CHUNK_SIZE + 1, CHUNK_SIZE), dtype=torch.float32)
    gated = args.g is not None
    parts = 1 if precision == 'ieee' and not gated else 2
    dtype = torch.float32 if gated else operand_dtype(precision)
    a = q.new_empty((slots, H, parts, CHUNK_SIZE, CHUNK_SIZE), dtype=dtype)
    kernel[(H * slots,)](
        q, k, gram, a, cu_seqlens, scale, T, N, H=H, K=K, S_Q=strides['S_Q'], S_K=strides['S_K'], DOT=precision, GATED=gated,
        **config.of(kernel), **FUSED,
    )
    return gram, a
