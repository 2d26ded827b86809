"""One token of the diagonal update, for decoding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import (
    SAME_IN_ALL_LANES,
    decays,
    given,
    is_scalar,
    launch_key,
    sigmoid,
    step_sizes,
    strided_inputs,
)
from fla_longhorn.ops.triton.diagonal.common import state_offsets, update
from fla_longhorn.ops.triton.diagonal.configs import for_step
from fla_longhorn.ops.triton.slots import locate_states, only_if, row_arguments


@triton.heuristics(given(USE_INITIAL_STATE='h0', STORE_FINAL_STATE='ht', HAS_D='D', HAS_Z='z', HAS_G='g'))
@triton.jit
def longhorn_step_kernel(
    q, k, v, beta, D, z, g, o, h0, ht, scale, s_qb, s_qh, s_qk, s_kb, s_kh, s_kk, s_vb, s_zb, s_gb, state_indices,
    final_state_indices, has_initial_state, pad_slot_id, s_h, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, OPTIONS: tl.constexpr, SCALAR_BETA: tl.constexpr, SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, STORE_FINAL_STATE: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_G: tl.constexpr, POOLED: tl.constexpr,
):
    """One token of every sequence in one launch; reads q and k themselves, not prepared rows.

    With POOLED, `h0` and `ht` are a pool whose rows are given by the indices; else row b is sequence b's.
    """
    i_p = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_h, i_b = i_p % NV, (i_p // NV) % H, (i_p // (NV * H)).to(tl.int64)
    o_k, o_v = tl.arange(0, BK)[:, None], (i_v * BV + tl.arange(0, BV))[None, :]
    m_k, m_v = o_k < K, o_v < V
    # [BK, 1]
    b_q = tl.load(q + i_b * s_qb + i_h * s_qh + o_k * s_qk, mask=m_k, other=0.).to(tl.float32) * scale
    b_k = tl.load(k + i_b * s_kb + i_h * s_kh + o_k * s_kk, mask=m_k, other=0.).to(tl.float32)
    # [1, BV]
    b_v = tl.load(v + i_b * s_vb + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32)
    if SCALAR_BETA:
        b_beta = tl.load(beta + i_b * H + i_h).to(tl.float32) + tl.zeros_like(b_v)
    else:
        b_beta = tl.load(beta + (i_b * H + i_h) * V + o_v, mask=m_v, other=0.).to(tl.float32)
    # [BK, BV]
    o_h, m_r, m_w = i_h * K * V + state_offsets(o_k, o_v, K, V, STATE_V_FIRST), m_k & m_v, m_k & m_v
    i_r, i_w = i_b, i_b
    if POOLED:
        i_r, i_w, read, written, used = locate_states(i_b, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        m_r, m_w = only_if(read, m_r), only_if(written, m_w)
    if USE_INITIAL_STATE:
        b_h = tl.load(h0 + i_r * s_h + o_h, mask=m_r, other=0.)
    else:
        b_h = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_G:
        if SCALAR_G:
            b_g = tl.load(g + i_b * s_gb + i_h)
        else:
            b_g = tl.load(g + i_b * s_gb + i_h * V + o_v, mask=m_v, other=0.)
        b_h *= decays(b_g)
    b_h = update(b_h, b_k, step_sizes(b_beta, tl.sum(b_k * b_k), OPTIONS), b_v)
    if STORE_FINAL_STATE:
        tl.store(ht + i_w * s_h + o_h, b_h, mask=m_w)
    b_o = tl.sum(b_q * b_h, 0)[None, :]
    if HAS_D:
        b_o += tl.load(D + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32) * b_v
    if HAS_Z:
        b_z = tl.load(z + i_b * s_zb + i_h * V + o_v, mask=m_v, other=0.).to(tl.float32)
        b_o *= b_z * sigmoid(b_z)
    if POOLED:
        b_o = tl.where(used, b_o, 0.)
    tl.store(o + (i_b * H + i_h) * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


def longhorn_diagonal_step(args: Arguments, ht: torch.Tensor | None, pool: Pool | None) -> torch.Tensor:
    """One token of B sequences in a single launch: return `o [B, 1, H, V]`, and write the final state to `ht`, where given."""
    args, strides = strided_inputs(args, ('v', 'z', 'g'))
    B, _, H, K, V = args.sizes
    q, k, v, beta, g = args.q, args.k, args.v, args.beta, args.g
    h0 = args.initial_state if pool is None else pool.states
    o = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    kernel, config = longhorn_step_kernel, for_step(launch_key(args))
    kernel[(B * H * triton.cdiv(V, config.BV),)](
        q, k, v, beta, args.D, args.z, g, o, h0, ht, args.scale, q.stride(0), q.stride(2), q.stride(3), k.stride(0),
        k.stride(2), k.stride(3), strides['S_V'], strides['S_Z'], None if g is None else strides['S_G'], H=H, K=K, V=V,
        OPTIONS=args.step_options, SCALAR_BETA=beta.dim() == 3, SCALAR_G=is_scalar(g),
        STATE_V_FIRST=args.state_v_first, **config.of(kernel), **SAME_IN_ALL_LANES, **row_arguments(pool, H * K * V),
    )
    return o
