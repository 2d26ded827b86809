"""The small operands of a chunk, shared by all channels of a head, in the order in which lanes hold them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import num_checkpoints
from fla_longhorn.ops.triton.common import FUSED, decays, is_scalar, padded_state_size
from fla_longhorn.ops.triton.exact.common import (
    Strides,
    head_and_index,
    load_tile,
    padded,
    product,
    rounded,
    row,
    split,
    to_digits,
)
from fla_longhorn.ops.triton.exact.gram import decays_between
from fla_longhorn.ops.triton.exact.mma.lanes import column_of, place, place_of_keys, place_of_two
from fla_longhorn.ops.triton.slots import locate_slot

CHUNK = 16


@triton.constexpr_function
def floats(K):
    """Float32 numbers of a chunk: L of both halves and between them, A of both, K by tokens; and of its tokens 16 each of
    |k|^2, decays until and after, 8 of G in pairs."""
    return 640 + 16 * K + 64


@triton.constexpr_function
def halves(K):
    """bfloat16 numbers of a chunk: K and Q by entries."""
    return 32 * K


@triton.constexpr_function
def reverse_halves(K):
    """bfloat16 numbers of a chunk in reverse: L^T of both halves, A^T of the first, between them and of the second, L^T
    between them, K and Q by tokens, K by entries; for a replay L of both halves, A of both, L between them, Q by entries; what
    A was rounded by, for a forward that keeps U."""
    return 768 + 48 * K + 640 + 16 * K + 256


@triton.jit
def gram_of(q, k, g, numbers, S: tl.constexpr, i_t, left, K: tl.constexpr, SCALAR_G: tl.constexpr):
    """Q and K `[16, BK]`, A and G `[16, 16]` of a chunk, with the decays of a gate; stores the numbers by tokens."""
    o_t, o_k = tl.arange(0, 16), tl.arange(0, padded(K))
    b_q, b_k = load_tile(q, S.q, i_t, o_t, o_k, left, K), load_tile(k, S.k, i_t, o_t, o_k, left, K)
    # rows are queries
    b_zero = tl.zeros([16, 16], dtype=tl.float32)
    b_gram = product(b_k, tl.trans(b_k), b_zero, 'bf16')
    b_a = product(b_q, tl.trans(b_k), b_zero, 'bf16')
    o_s, o_r = o_t[:, None], o_t[None, :]
    tl.store(numbers + o_s + o_r * 0, b_gram, mask=o_s == o_r)
    if SCALAR_G:
        b_g = tl.load(g + (i_t + o_t) * S.g, mask=o_t < left, other=0.0)
        b_d = decays_between(b_g)
        b_gram *= b_d
        b_a *= b_d
        tl.store(numbers + 16 + o_t, decays(tl.cumsum(b_g.to(tl.float32), 0)))
        tl.store(numbers + 32 + o_t, row(b_d, 15))
    tl.store(numbers + 48 + o_r // 2 + o_s * 0, b_gram, mask=(o_s == o_r + 1) & (o_r % 2 == 0))
    return b_q, b_k, tl.where(o_s >= o_r, b_a, 0.0), b_gram


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
    b_q, b_k, b_a, b_gram = gram_of(
        q + i_h * K, k + i_h * K, None if g is None else g + i_h, numbers + 640 + 16 * BK, S, bos + i_t, left, K, SCALAR_G,
    )
    tl.store(operands + place_of_keys(o_t[:, None], o_k[None, :], BK), b_k)
    tl.store(operands + 16 * BK + place_of_keys(o_t[:, None], o_k[None, :], BK), b_q)
    o_c = column_of(o_k, BK)[None, :]
    tl.store(numbers + 640 + o_c // 8 * 128 + place(o_c % 8, o_t[:, None]), -b_k.to(tl.float32))
    o_s, o_r = o_t[:, None], o_t[None, :]
    tl.store(numbers + 384 + o_s // 8 * 128 + place(o_s % 8, o_r), to_digits(-b_a, 'tf32'))
    b_hi, b_lo = split(tl.where(o_s // 2 > o_r // 2, -b_gram, 0.0), 'tf32')
    o_l = tl.where(o_s // 8 == o_r // 8, o_s // 8, 2) * 128 + place(o_s % 8, o_r % 8)
    tl.store(numbers + o_l, b_hi, mask=o_s // 8 >= o_r // 8)
    tl.store(numbers + o_l + 2, b_lo, mask=o_s // 8 >= o_r // 8)


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_operands(
    q,
    k,
    g,
    operands,
    numbers,
    cu_seqlens,
    scale,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    SCALAR_G: tl.constexpr,
):
    """As above for the reverse pass: -L^T between pairs of tokens and A^T, scaled, in two parts each, -K, Q, K."""
    i_h, i_c = head_and_index(H)
    _, bos, T_n, i_t = locate_slot(cu_seqlens, i_c, T, N, 16, cu_seqlens is not None)
    left = T_n - i_t
    BK: tl.constexpr = padded(K)
    o_t, o_k = tl.arange(0, 16), tl.arange(0, BK)
    i_x = i_c.to(tl.int64) * H + i_h
    operands += i_x * reverse_halves(BK)
    b_q, b_k, b_a, b_gram = gram_of(
        q + i_h * K, k + i_h * K, None if g is None else g + i_h, numbers + i_x * 64, S, bos + i_t, left, K, SCALAR_G,
    )
    if scale is not None:
        b_a *= scale
    # rows are sums, columns results
    o_s, o_r = o_t[:, None], o_t[None, :]
    b_hi, b_lo = split(tl.where(o_s // 2 > o_r // 2, -b_gram, 0.0), 'bf16')
    p_two = operands + place_of_two(o_r % 8, o_s % 8, o_r // 8)
    tl.store(p_two, b_hi, mask=o_s // 8 == o_r // 8)
    tl.store(p_two + 2, b_lo, mask=o_s // 8 == o_r // 8)
    p_one = operands + 512 + place(o_r % 8, o_s % 8)
    tl.store(p_one + 128, b_hi, mask=o_s // 8 > o_r // 8)
    tl.store(p_one + 130, b_lo, mask=o_s // 8 > o_r // 8)
    b_hi, b_lo = split(b_a, 'bf16')
    p_two = operands + 256 + place_of_two(o_r, o_s % 8, o_s // 8)
    tl.store(p_two, b_hi, mask=o_r < 8)
    tl.store(p_two + 2, b_lo, mask=o_r < 8)
    tl.store(p_one, b_hi, mask=(o_r >= 8) & (o_s >= 8))
    tl.store(p_one + 2, b_lo, mask=(o_r >= 8) & (o_s >= 8))
    o_c = column_of(o_k, BK)[None, :]
    p_columns = operands + 768 + o_c // 16 * 256 + place_of_two(o_c % 8, o_t[:, None], o_c // 8 % 2)
    tl.store(p_columns, rounded(-b_k.to(tl.float32), tl.bfloat16))
    tl.store(p_columns + 16 * BK, b_q)
    o_e = place_of_keys(o_t[:, None], o_k[None, :], BK)
    tl.store(operands + 768 + 32 * BK + o_e, b_k)
    operands += 768 + 48 * BK
    tl.store(operands + 640 + o_e, b_q)
    # rows are results, columns sums
    b_hi = rounded(-b_a, tl.bfloat16)
    p_two = operands + place_of_two(o_s % 8, o_r, o_s // 8)
    tl.store(p_two + 256, b_hi)
    tl.store(p_two + 640 + 16 * BK, rounded(-b_a - b_hi.to(tl.float32), tl.bfloat16))
    b_hi, b_lo = split(tl.where(o_s // 2 > o_r // 2, -b_gram, 0.0), 'bf16')
    p_two = operands + place_of_two(o_s % 8, o_r % 8, o_s // 8)
    tl.store(p_two, b_hi, mask=o_s // 8 == o_r // 8)
    tl.store(p_two + 2, b_lo, mask=o_s // 8 == o_r // 8)
    p_one = operands + 512 + place(o_s % 8, o_r % 8)
    tl.store(p_one, b_hi, mask=o_s // 8 > o_r // 8)
    tl.store(p_one + 2, b_lo, mask=o_s // 8 > o_r // 8)


def chunk_longhorn_exact_operands(args: Arguments, strides: Strides, *, reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `operands [slots, H, ..]` in bfloat16 and `numbers [slots, H, ..]` in float32."""
    q, k, cu_seqlens = args.q, args.k, args.cu_seqlens
    B, T, H, K = q.shape
    N, BK = args.num_sequences, padded_state_size(K)
    slots = num_checkpoints(B, T, N, CHUNK, cu_seqlens is not None)
    kernel = chunk_longhorn_exact_bwd_kernel_operands if reverse else chunk_longhorn_exact_kernel_operands
    operands = q.new_empty((slots, H, reverse_halves(BK) if reverse else halves(BK)), dtype=torch.bfloat16)
    numbers = q.new_empty((slots, H, 64 if reverse else floats(BK)), dtype=torch.float32)
    kernel[(H * slots,)](
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
        **(dict(scale=None if args.scale == 1 else args.scale) if reverse else {}),
        num_warps=1,
        **FUSED,
    )
    return operands, numbers
