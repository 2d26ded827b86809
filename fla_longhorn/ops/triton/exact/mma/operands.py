"""The small operands of a chunk, shared by all channels of a head, in the order in which lanes hold them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import num_checkpoints
from fla_longhorn.ops.triton.common import FUSED, decays, is_scalar, padded_state_size
from fla_longhorn.ops.triton.exact.common import Strides, head_and_index, load_tile, padded, product, rounded, row, split
from fla_longhorn.ops.triton.exact.gram import decays_between
from fla_longhorn.ops.triton.exact.mma.lanes import column_of, place, place_of_keys
from fla_longhorn.ops.triton.slots import locate_slot

CHUNK = 16


@triton.constexpr_function
def floats(K):
    """Float32 numbers of a chunk: L of both halves and between them, K by tokens, 16 each of |k|^2, decays until and after,
    8 of G in pairs."""
    return 384 + 16 * K + 64


@triton.constexpr_function
def halves(K):
    """bfloat16 numbers of a chunk: A, K and Q by entries."""
    return 256 + 32 * K


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_kernel_operands(
    q,
    k,
    g,
    operands,
    numbers,
    cu_seqlens,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    SCALAR_G: tl.constexpr,
):
    """Store -L between pairs of tokens in two parts, -K, -A with `A = tril(Q K^T)`, K, Q, and numbers by tokens.

    A decay per head is in L and A.
    """
    i_h, i_c = head_and_index(H)
    _, bos, T_n, i_t = locate_slot(cu_seqlens, i_c, T, N, 16, cu_seqlens is not None)
    left = T_n - i_t
    BK: tl.constexpr = padded(K)
    o_t, o_k = tl.arange(0, 16), tl.arange(0, BK)
    i_x = i_c.to(tl.int64) * H + i_h
    operands += i_x * halves(BK)
    numbers += i_x * floats(BK)
    p_numbers = numbers + 384 + 16 * BK
    # [16, BK]
    b_q = load_tile(q + i_h * K, S.q, bos + i_t, o_t, o_k, left, K)
    b_k = load_tile(k + i_h * K, S.k, bos + i_t, o_t, o_k, left, K)
    tl.store(operands + 256 + place_of_keys(o_t[:, None], o_k[None, :], BK), b_k)
    tl.store(operands + 256 + 16 * BK + place_of_keys(o_t[:, None], o_k[None, :], BK), b_q)
    o_c = column_of(o_k, BK)[None, :]
    tl.store(numbers + 384 + o_c // 8 * 128 + place(o_c % 8, o_t[:, None]), -b_k.to(tl.float32))
    # [16, 16], rows are queries
    b_zero = tl.zeros([16, 16], dtype=tl.float32)
    b_gram = product(b_k, tl.trans(b_k), b_zero, 'bf16')
    b_a = product(b_q, tl.trans(b_k), b_zero, 'bf16')
    o_s, o_r = o_t[:, None], o_t[None, :]
    tl.store(p_numbers + o_s + o_r * 0, b_gram, mask=o_s == o_r)
    if SCALAR_G:
        b_g = tl.load(g + i_h + (bos + i_t + o_t) * S.g, mask=o_t < left, other=0.0)
        b_d = decays_between(b_g)
        b_gram *= b_d
        b_a *= b_d
        tl.store(p_numbers + 16 + o_t, decays(tl.cumsum(b_g.to(tl.float32), 0)))
        tl.store(p_numbers + 32 + o_t, row(b_d, 15))
    tl.store(p_numbers + 48 + o_r // 2 + o_s * 0, b_gram, mask=(o_s == o_r + 1) & (o_r % 2 == 0))
    b_a = tl.where(o_s >= o_r, -b_a, 0.0)
    tl.store(operands + o_s % 8 * 32 + o_s // 8 * 4 + place(0, o_r) % 4 + o_r % 8 // 2 * 8, rounded(b_a, tl.bfloat16))
    b_hi, b_lo = split(tl.where(o_s // 2 > o_r // 2, -b_gram, 0.0), 'tf32')
    o_l = tl.where(o_s // 8 == o_r // 8, o_s // 8, 2) * 128 + place(o_s % 8, o_r % 8)
    tl.store(numbers + o_l, b_hi, mask=o_s // 8 >= o_r // 8)
    tl.store(numbers + o_l + 2, b_lo, mask=o_s // 8 >= o_r // 8)


def chunk_longhorn_exact_operands(args: Arguments, strides: Strides) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `operands [slots, H, ..]` in bfloat16 and `numbers [slots, H, ..]` in float32."""
    q, k, cu_seqlens = args.q, args.k, args.cu_seqlens
    B, T, H, K = q.shape
    N, BK = args.num_sequences, padded_state_size(K)
    slots = num_checkpoints(B, T, N, CHUNK, cu_seqlens is not None)
    operands = q.new_empty((slots, H, halves(BK)), dtype=torch.bfloat16)
    numbers = q.new_empty((slots, H, floats(BK)), dtype=torch.float32)
    chunk_longhorn_exact_kernel_operands[(H * slots,)](
        q=q,
        k=k,
        g=args.g,
        operands=operands,
        numbers=numbers,
        cu_seqlens=cu_seqlens,
        T=T,
        N=N,
        H=H,
        K=K,
        S=strides,
        SCALAR_G=is_scalar(args.g),
        num_warps=1,
        **FUSED,
    )
    return operands, numbers
