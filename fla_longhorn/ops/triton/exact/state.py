"""The state `[BV, BK]` as a tuple of slices `[BV, BS]` of its keys: loads, stores and the update by a chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.exact.common import operand, product, rounded, split, tile_mask
from fla_longhorn.ops.triton.slots import only_if


@triton.jit
def state_mask(o_k, o_v, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Mask of a state's tile `[BV, BK]`, in a shape that broadcasts to it."""
    # the interpreter lacks `V % BV` for a shape
    if V // BV * BV == V:
        return (o_k < K)[None, :]
    else:
        return (o_v < V)[:, None] & (o_k < K)[None, :]


@triton.jit
def load_slice(p_x, o_t, o_k, s: tl.constexpr, left, K: tl.constexpr, PARTIAL: tl.constexpr, AGAIN: tl.constexpr = False):
    """Slice `s` `[BT, BS]` of a tile of keys or queries; `p_x` has the addresses of slice 0, `AGAIN` is as in `load_tile`."""
    BS: tl.constexpr = o_k.shape[0]
    cache: tl.constexpr = '.ca' if AGAIN else ''
    m_x = tile_mask(o_t, o_k, left, BS, BS, PARTIAL)
    if (s + 1) * BS > K:
        m_x = m_x & (o_k + s * BS < K)[None, :]
    return tl.load(p_x + s * BS, mask=m_x, other=0.0, cache_modifier=cache)


@triton.jit
def state_offsets(o_k, o_v, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """Offsets `[BV, BK]` in a state `[K, V]`, or `[V, K]` with `STATE_V_FIRST`; int64 makes them immediate offsets."""
    if STATE_V_FIRST:
        return o_v[:, None].to(tl.int64) * K + o_k[None, :]
    else:
        return o_k[None, :].to(tl.int64) * V + o_v[:, None]


@triton.jit
def load_state(p_h, o_k, o_v, flag, K: tl.constexpr, V: tl.constexpr, SLICES: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """The state `[BV, BK]` at `p_h`, as a tuple of slices `[BV, BS]`; zeros unless the scalar `flag` holds or is None."""
    BV: tl.constexpr = o_v.shape[0]
    BS: tl.constexpr = o_k.shape[0]
    b_h = ()
    for s in tl.static_range(SLICES):
        m_h = state_mask(o_k + s * BS, o_v, K, V, BV)
        if flag is not None:
            m_h = only_if(flag, m_h)
        b_h = b_h + (tl.load(p_h + state_offsets(o_k + s * BS, o_v, K, V, STATE_V_FIRST), mask=m_h, other=0.0),)
    return b_h


@triton.jit
def store_state(
    p_h, b_h, o_k, o_v, flag, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr, PARTS: tl.constexpr = 1,
):
    """Store a state if the scalar `flag` holds or is None: rounded, or with `PARTS = 2` as the two states of its parts."""
    BV: tl.constexpr = o_v.shape[0]
    BS: tl.constexpr = o_k.shape[0]
    for s in tl.static_range(len(b_h)):
        p_s = p_h + state_offsets(o_k + s * BS, o_v, K, V, STATE_V_FIRST)
        m_h = state_mask(o_k + s * BS, o_v, K, V, BV)
        if flag is not None:
            m_h = only_if(flag, m_h)
        if PARTS == 2:
            b_hi, b_lo = split(b_h[s], 'bf16')
            tl.store(p_s, b_hi, mask=m_h)
            tl.store(p_s + K * V, b_lo, mask=m_h)
        else:
            tl.store(p_s, rounded(b_h[s], p_h.dtype.element_ty), mask=m_h)


@triton.jit
def zero_state(BV: tl.constexpr, BS: tl.constexpr, SLICES: tl.constexpr):
    """A state of zeros, as a tuple of slices."""
    b_h = ()
    for _ in tl.static_range(SLICES):
        b_h = b_h + (tl.zeros([BV, BS], dtype=tl.float32),)
    return b_h


@triton.jit
def add_updates(
    b_h, b_o, b_u, b_k, p_k, o_t, o_k, left, p_a, K: tl.constexpr, DOT: tl.constexpr, SPLIT: tl.constexpr,
    OUTPUT: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Add a chunk's `K^T U` to the state and, with `OUTPUT`, `(A U)^T` to `b_o [BV, BT]`; return both. `b_u` is U `[BT, BV]`.

    `b_k` holds the slices of k; if None, they are loaded from `p_k` again. With `SPLIT`, U does not lose digits to `DOT`.
    """
    BT: tl.constexpr = b_u.shape[0]
    if OUTPUT:
        # [BT, BT]
        b_a = tl.load(p_a + o_t[:, None] * BT + o_t[None, :])
    if SPLIT:
        b_hi, b_lo = split(b_u, DOT)
        b_u, b_lo = tl.trans(b_hi), tl.trans(b_lo)
    else:
        b_u = tl.trans(operand(b_u, DOT))
    if OUTPUT:
        b_o = product(b_u, b_a, b_o, DOT)
        if SPLIT:
            b_o = product(b_lo, b_a, b_o, DOT)
    b_next = ()
    for s in tl.static_range(len(b_h)):
        b_ks = load_slice(p_k, o_t, o_k, s, left, K, PARTIAL, True) if b_k is None else b_k[s]
        b_s = product(b_u, b_ks, b_h[s], DOT)
        if SPLIT:
            b_s = product(b_lo, b_ks, b_s, DOT)
        b_next = b_next + (b_s,)
    return b_next, b_o
