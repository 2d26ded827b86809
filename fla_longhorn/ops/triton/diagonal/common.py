"""Steps that the kernels of the diagonal update share.

Tiles: a state is `[BK, BV]`, a value of all channels `[1, BV]`, a key or query `[BK, 1]`. A thread owns one or two channels
and all their BK entries, so sums over K stay inside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.triton.common import FUSED, launch_key, padded_state_size
from fla_longhorn.ops.triton.diagonal.configs import for_prepare
from fla_longhorn.ops.triton.slots import locate_slot


@triton.jit
def locate_segment(i_s, cu_seqlens, T, N, L, IS_VARLEN: tl.constexpr):
    """Return segment slot `i_s`'s sequence, that sequence's first token and end, the segment's, and whether it is in use.

    An empty sequence has one empty segment.
    """
    i_n, bos, T_n, i_t = locate_slot(cu_seqlens, i_s, T, N, L, IS_VARLEN)
    beg, eos = bos + i_t, bos + T_n
    used = (beg < eos) | (i_t == 0)
    return i_n, bos, eos, tl.minimum(beg, eos), tl.minimum(beg + L, eos), used


@triton.jit
def state_offsets(o_k, o_v, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """Offsets `[BK, BV]` inside one state, `[V, K]` or `[K, V]`."""
    if STATE_V_FIRST:
        return o_k + o_v * K
    else:
        return o_k * V + o_v


@triton.jit
def load_masked(p, m, MASKED: tl.constexpr):
    """Load `p` as float32; with `MASKED`, zero where `m` is false."""
    if MASKED:
        return tl.load(p, mask=m, other=0.).to(tl.float32)
    else:
        return tl.load(p).to(tl.float32)


@triton.jit
def unpack_pairs(b_x):
    """Words `[1, BV / 2]` of two bfloat16 values as float32 `[1, BV]`: loaded so, a pair takes one instruction less."""
    b_x = tl.join((b_x << 16).to(tl.float32, bitcast=True), (b_x & -65536).to(tl.float32, bitcast=True))
    return tl.reshape(b_x, (1, 2 * b_x.shape[1]))


@triton.jit
def update(b_h, b_k, b_eps, b_v):
    """S + (k eps) (v - k S): three instructions for each entry of the state."""
    return b_h + (b_k * b_eps) * (b_v - b_k * b_h)


@triton.jit
def unstack(x):
    """The columns of `[N, U]`, each `[N, 1]`."""
    N: tl.constexpr = x.shape[0]
    U: tl.constexpr = x.shape[1]
    if U == 1:
        return (x,)
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (N, 2, U // 2)), (0, 2, 1)))
        return unstack(a) + unstack(b)


@triton.heuristics({'PADDED': lambda args: args['K'] != args['BK']})
@triton.jit(do_not_specialize=['T', 'TT', 's_qb', 's_qt', 's_qh', 's_kb', 's_kt', 's_kh'])
def longhorn_prepare_kernel(
    q, k, rows, scale, T, TT, s_qb, s_qt, s_qh, s_qk, s_kb, s_kt, s_kh, s_kk, H: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PADDED: tl.constexpr, SQUARES: tl.constexpr,
):
    """Write float32 rows `(k, scale * q, |k|^2 and three unused, k^2)` for every head and token; K is zero-padded to BK."""
    i_t, i_h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    o_t, o_k = i_t * BT + tl.arange(0, BT), tl.arange(0, BK)
    m_t = o_t < TT
    m = m_t[:, None]
    if PADDED:
        m = m & (o_k < K)[None, :]
    i_b, i_t = o_t // T, o_t % T
    # [BT, BK]
    p_q = q + (i_b * s_qb + i_t * s_qt + i_h * s_qh)[:, None] + o_k[None, :].to(tl.int64) * s_qk
    p_k = k + (i_b * s_kb + i_t * s_kt + i_h * s_kh)[:, None] + o_k[None, :].to(tl.int64) * s_kk
    b_q = tl.load(p_q, mask=m, other=0.).to(tl.float32)
    b_k = tl.load(p_k, mask=m, other=0.).to(tl.float32)
    p_r = rows + (i_h * TT + o_t)[:, None] * R + o_k[None, :]
    b_k2 = b_k * b_k
    tl.store(p_r, b_k, mask=m_t[:, None])
    tl.store(p_r + BK, b_q * scale, mask=m_t[:, None])
    tl.store(rows + (i_h * TT + o_t) * R + 2 * BK, tl.sum(b_k2, 1), mask=m_t)
    if SQUARES:
        tl.store(p_r + 2 * BK + 4, b_k2, mask=m_t[:, None])


def prepare_rows(args: Arguments, *, squares: bool) -> torch.Tensor:
    """Float32 rows `[H, B * T, R]` of keys and queries: the kernels load them wide and without conversions."""
    q, k, kernel, config = args.q, args.k, longhorn_prepare_kernel, for_prepare(launch_key(args))
    B, T, H, K = q.shape
    BK = padded_state_size(K)
    R = (3 if squares else 2) * BK + 4
    rows = torch.empty(H, B * T, R, dtype=torch.float32, device=q.device)
    kernel[(triton.cdiv(B * T, config.BT) * H,)](
        q, k, rows, args.scale, T, B * T, *q.stride(), *k.stride(), H=H, K=K, BK=BK, R=R, SQUARES=squares, **config.of(kernel),
        **FUSED,
    )
    return rows

