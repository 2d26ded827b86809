"""The state `[BV, BK]`: loads, stores and the update by a chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.exact.common import rounded, split
from fla_longhorn.ops.triton.slots import only_if


@triton.jit
def state_mask(o_k, o_v, flag, K: tl.constexpr, V: tl.constexpr):
    """Mask of a state's tile `[BV, BK]`; no entry of it unless the scalar `flag` holds or is None."""
    BV: tl.constexpr = o_v.shape[0]
    m_h = (o_v * 0 < 1)[:, None] if V // BV * BV == V else (o_v < V)[:, None]
    m_h = m_h & (o_k < K)[None, :]
    return m_h if flag is None else only_if(flag, m_h)


@triton.jit
def state_offsets(o_k, o_v, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """Offsets `[BV, BK]` in a state `[K, V]`, or `[V, K]` with `STATE_V_FIRST`; int64 makes them immediate offsets."""
    if STATE_V_FIRST:
        return o_v[:, None].to(tl.int64) * K + o_k[None, :]
    else:
        return o_k[None, :].to(tl.int64) * V + o_v[:, None]


@triton.jit
def load_state(p_h, o_k, o_v, flag, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr):
    """The state `[BV, BK]` at `p_h`; zeros unless the scalar `flag` holds or is None."""
    return tl.load(p_h + state_offsets(o_k, o_v, K, V, STATE_V_FIRST), mask=state_mask(o_k, o_v, flag, K, V), other=0.0)


@triton.jit
def store_state(
    p_h, b_h, o_k, o_v, flag, K: tl.constexpr, V: tl.constexpr, STATE_V_FIRST: tl.constexpr, PARTS: tl.constexpr = 1,
):
    """Store a state if the scalar `flag` holds or is None: rounded, or with `PARTS = 2` as the two states of its parts."""
    p_h += state_offsets(o_k, o_v, K, V, STATE_V_FIRST)
    m_h = state_mask(o_k, o_v, flag, K, V)
    if PARTS == 2:
        b_hi, b_lo = split(b_h, 'bf16')
        tl.store(p_h, b_hi, mask=m_h)
        tl.store(p_h + K * V, b_lo, mask=m_h)
    else:
        tl.store(p_h, rounded(b_h, p_h.dtype.element_ty), mask=m_h)
