"""What the kernels of the diagonal update share: launch parameters, steps, and the kernel that prepares keys and queries.

Tiles: a state is `[BK, BV]`, a value of all channels `[1, BV]`, a key or query `[BK, 1]`. A thread owns one or two channels
and all their BK entries, so sums over K stay inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import FUSED, no_step, padded_state_size
from fla_longhorn.ops.triton.launch import LaunchConfig, LaunchKey
from fla_longhorn.ops.triton.slots import locate_slot

padded = triton.constexpr_function(padded_state_size)
# channels of a program of one warp in backward and in the summaries of segments
CHANNELS = 32
# programs of 32 channels that a multiprocessor should hold: two for each of its four schedulers
PROGRAMS_PER_MULTIPROCESSOR = 8
# a segment is not shorter: a second pass would cost more than it saves
MIN_SEGMENT_LENGTH = 256
# backward cuts a segment of at least this length into slices
MIN_SLICED_LENGTH = 1024
# programs of one warp that a multiprocessor's registers should hold where `maxnreg` limits them, an option for NVIDIA only
RESIDENT_PROGRAMS = 16


@dataclass(frozen=True)
class DiagonalConfig(LaunchConfig):
    """Launch parameters of a program with a state `[BK, BV]`, of one warp; `U` tokens are loaded ahead."""

    BK: int
    BV: int
    U: int = 1
    num_stages: int | None = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        assert self.BK >= 16 and 4 % self.U == 0 and self.num_warps == 1


def for_forward(key: LaunchKey) -> DiagonalConfig:
    """At most 64 state entries a thread, which leaves registers for the rest, and a loop of at most 768 instructions.

    From K = 65 on, a warp has fewer channels than threads, and several threads share the entries of a channel.
    """
    BK = padded_state_size(key.K)
    return DiagonalConfig(BK, min(32, 2048 // BK), U={16: 4, 32: 2}.get(BK, 1))


def for_backward(key: LaunchKey, gated: bool, sigmoid: bool) -> DiagonalConfig:
    """By blocks of 16 entries of K: a channel a thread, so that nothing waits for another warp.

    With two tokens a block half as many states are saved. With a gate, sums in float32, or beta itself in place of its logit,
    such a loop has more than 768 instructions.
    """
    return DiagonalConfig(16, CHANNELS, U=2 if sigmoid and not gated and key.precision != 'ieee' else 1)


def for_segments(key: LaunchKey) -> DiagonalConfig:
    """Blocks as in backward."""
    few = key.card.registers // (32 * RESIDENT_PROGRAMS) if key.card.backend == 'cuda' else None
    return DiagonalConfig(16, CHANNELS, U=2, maxnreg=few)


def for_step(key: LaunchKey) -> DiagonalConfig:
    BK = padded_state_size(key.K)
    return DiagonalConfig(BK, max(min(triton.next_power_of_2(key.V), 1024 // BK), 16))


def slice_length(length: int, K: int, is_varlen: bool) -> int:
    """Tokens of a segment of `length` that one launch of backward processes, and keeps partial sums of dq and dk for.

    Packed sequences are not sliced: where their lengths differ, a slice would leave programs without work.
    """
    if is_varlen or length < MIN_SLICED_LENGTH:
        return length
    interval = checkpoint_interval(K)
    return triton.cdiv(length, interval * (2 if K <= 32 else 4)) * interval


@triton.constexpr_function
def scratch_sizes(INTERVAL, NK, BK, BV, U, SCALAR_BETA, HAS_G):
    """Floats of the two parts of a program's scratch buffer in backward.

    First the states of an interval, one for each block of U tokens; then for each token and channel, terms to sum over
    channels, and sums over the blocks of K so far.
    """
    sums = (2 if SCALAR_BETA else 1) + (3 + HAS_G if NK > 1 else 0)
    return INTERVAL // U * BK * BV, sums * INTERVAL * BV


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
def channel_offsets(i_v, BV: tl.constexpr):
    """Channels `[1, BV]` of a program, without the hint that they are adjacent: then a thread owns one, of states too."""
    return i_v * BV + tl.max_contiguous(tl.arange(0, BV), 1)[None, :]


@triton.jit
def channel_pointers(x, t, i_h, o_v, S: tl.constexpr, V: tl.constexpr, SCALAR: tl.constexpr):
    """Pointers `[1, BV]` to token t's values of a head; with SCALAR it has one for all channels."""
    if SCALAR:
        return x + (t * S + i_h) + o_v * 0
    else:
        return x + (t * S + i_h * V) + o_v


@triton.jit
def load_tokens(p, t, n_u, m_v, S: tl.constexpr, OTHER: tl.constexpr, U: tl.constexpr):
    """Words of tokens t to t + U - 1 counted from `p [1, BV]`; OTHER for those from the n_u-th on."""
    xs = ()
    for u in tl.static_range(U):
        m = m_v & (tl.full(m_v.shape, u, tl.int32) < n_u)
        xs = xs + (to_word(tl.load(p + (t + u) * S, mask=m, other=OTHER)),)
    return xs


@triton.jit
def load_inputs(ps, t, n_u, m_v, STRIDES: tl.constexpr, OPTIONS: tl.constexpr, U: tl.constexpr):
    """:func:`load_tokens` for each of `ps`, of which the second is beta's.

    Tokens from the n_u-th on have a value, gradient and g of zero and a step size of zero: they change nothing.
    """
    xs = ()
    for i in tl.static_range(len(ps)):
        xs = xs + (load_tokens(ps[i], t, n_u, m_v, STRIDES[i], no_step(OPTIONS) if i == 1 else 0., U),)
    return xs


@triton.jit
def to_word(b_x):
    """A loaded value in a 32-bit register, unconverted: a loop would copy 16-bit values between registers."""
    if b_x.dtype.primitive_bitwidth == 16:
        return b_x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        return b_x


@triton.jit
def from_word(b_x, p):
    """Float32 of a word that was loaded from `p`."""
    DTYPE: tl.constexpr = p.dtype.element_ty
    if tl.bfloat16 == DTYPE:
        return (b_x << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        return b_x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return b_x.to(tl.float32)


@triton.jit
def row_offset(u: tl.constexpr, n_u, S_KQ: tl.constexpr):
    """Offset of token u's row, of the last one's where only n_u tokens exist."""
    if u == 0:
        return 0
    else:
        return tl.minimum(u, n_u - 1) * S_KQ


@triton.jit
def load_rows(p_row, o_k, n_u, KP: tl.constexpr, S_KQ: tl.constexpr, U: tl.constexpr):
    """Entries `o_k` of the rows of U tokens, `[N, U]`, and a tuple of their |k|^2; the last row where fewer than U exist."""
    ns = ()
    for u in tl.static_range(U):
        ns = ns + (tl.load(p_row + row_offset(u, n_u, S_KQ) + 2 * KP),)
    if U == 1:
        return tl.load(p_row + o_k[:, None]), ns
    else:
        o_u = tl.minimum(tl.arange(0, U), n_u - 1)
        return tl.load(p_row + o_u[None, :] * S_KQ + o_k[:, None]), ns


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


@triton.jit
def update(b_h, b_k, b_eps, b_v):
    """P + (k eps) (v - k P): three instructions for each entry of the state."""
    return b_h + (b_k * b_eps) * (b_v - b_k * b_h)


@triton.jit(do_not_specialize=['T', 'TT', 's_qb', 's_qt', 's_qh', 's_kb', 's_kt', 's_kh'])
def longhorn_prepare_kernel(
    q,
    k,
    kq,
    scale,
    T,
    TT,
    s_qb,
    s_qt,
    s_qh,
    s_qk,
    s_kb,
    s_kt,
    s_kh,
    s_kk,
    H: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BT: tl.constexpr,
):
    """Write float32 rows (k, scale * q, |k|^2 and three unused) for every token and head; K is zero-padded to KP."""
    i_t, i_h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    o_t, o_k = i_t * BT + tl.arange(0, BT), tl.arange(0, KP)
    m_t = o_t < TT
    m = m_t[:, None] & (o_k < K)[None, :]
    i_b, i_t = o_t // T, o_t % T
    # [BT, KP]
    p_q = q + (i_b * s_qb + i_t * s_qt + i_h * s_qh)[:, None] + o_k[None, :].to(tl.int64) * s_qk
    p_k = k + (i_b * s_kb + i_t * s_kt + i_h * s_kh)[:, None] + o_k[None, :].to(tl.int64) * s_kk
    b_q = tl.load(p_q, mask=m, other=0.).to(tl.float32)
    b_k = tl.load(p_k, mask=m, other=0.).to(tl.float32)
    # [BT]
    p_row = kq + (o_t * H + i_h) * (2 * KP + 4)
    tl.store(p_row[:, None] + o_k[None, :], b_k, mask=m_t[:, None])
    tl.store(p_row[:, None] + KP + o_k[None, :], b_q * scale, mask=m_t[:, None])
    tl.store(p_row + 2 * KP, tl.sum(b_k * b_k, 1), mask=m_t)


def prepare_rows(args: Arguments) -> torch.Tensor:
    """Float32 rows `[B * T + 1, H, 2 * KP + 4]` of keys and queries: kernels load them wide and without conversions.

    The last one is not written, and read only for segments without tokens.
    """
    q, k = args.q, args.k
    B, T, H, K = q.shape
    KP = padded_state_size(K)
    BT = max(1024 // KP, 4)
    kq = torch.empty(B * T + 1, H, 2 * KP + 4, dtype=torch.float32, device=q.device)
    longhorn_prepare_kernel[(triton.cdiv(B * T, BT) * H,)](
        q=q,
        k=k,
        kq=kq,
        scale=args.scale,
        T=T,
        TT=B * T,
        s_qb=q.stride(0),
        s_qt=q.stride(1),
        s_qh=q.stride(2),
        s_qk=q.stride(3),
        s_kb=k.stride(0),
        s_kt=k.stride(1),
        s_kh=k.stride(2),
        s_kk=k.stride(3),
        H=H,
        K=K,
        KP=KP,
        BT=BT,
        num_warps=4,
        **FUSED,
    )
    return kq
