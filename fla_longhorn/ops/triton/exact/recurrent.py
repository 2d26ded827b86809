"""The exact update as a recurrence, 3 FMA per state entry and token: decoding and short sequences, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import (
    SAME_IN_ALL_LANES,
    decays,
    is_scalar,
    launch_key,
    sigmoid,
    step_sizes,
    strided_inputs,
    weighted_rows,
)
from fla_longhorn.ops.triton.exact.common import head_index_and_channels, interval_of, rounded
from fla_longhorn.ops.triton.exact.configs import for_recurrent
from fla_longhorn.ops.triton.exact.state import state_offsets
from fla_longhorn.ops.triton.slots import first_slot, has_spare_slot, locate_states, only_if, row_arguments, sequence_range


@triton.jit
def sum_rows(b_x, b_h, ROWS: tl.constexpr):
    """sum_k x[k] h[k, v] as `[BV]`; unless ROWS is 0, in an order that does not depend on what else the kernel does."""
    if ROWS == 0:
        return tl.sum(b_x[:, None] * b_h, 0)
    else:
        return tl.reshape(weighted_rows(b_x[:, None], b_h, ROWS, True), (b_h.shape[1],))


@triton.jit(do_not_specialize=['T'])
def fused_recurrent_longhorn_exact_fwd_kernel(
    q,
    k,
    v,
    beta,
    D,
    z,
    g,
    h0,
    o,
    ht,
    states,
    cu_seqlens,
    scale,
    T,
    s_q,
    s_k,
    s_v,
    s_z,
    s_g,
    state_indices,
    final_state_indices,
    has_initial_state,
    pad_slot_id,
    s_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    SCALAR_G: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    POOLED: tl.constexpr,
):
    r"""One block of channels of one sequence, token by token (arXiv 2407.14207, Theorem 3.1, Eq. 6):

    .. math::
        u_t = \epsilon_t \odot (v_t - k_t^\top S_{t-1}), \qquad S_t = S_{t-1} + k_t \otimes u_t, \qquad o_t = q_t^\top S_t

    With g, the state is multiplied by :math:`e^{g_t}` before the step.

    A token has the same bits alone and in a sequence: the compiler would fuse other products in each variant of the kernel,
    but has no choice up to K = 128.

    With POOLED, `h0` and `ht` are a pool, with rows given by the indices; else row n is sequence n's.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    INTERVAL: tl.constexpr = interval_of(K)
    i_h, i_n, i_v = head_index_and_channels(H, V, BV)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_k = tl.arange(0, BK)
    # the width of loads decides which channels a thread owns
    o_v = i_v * BV + tl.max_contiguous(tl.arange(0, BV), VEC)
    m_k, m_v = o_k < K, o_v < V
    m_h = m_k[:, None] & m_v[None, :]
    o_state = i_h * (K * V) + tl.trans(state_offsets(o_k, o_v, K, V, STATE_V_FIRST))
    i_r, m_r = i_n.to(tl.int64), m_h
    i_w, m_w = i_r, m_h
    if POOLED:
        i_r, i_w, read, written, used = locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        m_r, m_w = only_if(read, m_h), only_if(written, m_h)
    if states is not None:
        p_s = states + (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) * H + i_h) * (K * V)
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)

    # [BK, BV]
    b_h = tl.load(h0 + i_r * s_h + o_state, mask=m_r, other=0.0) if h0 is not None else tl.zeros([BK, BV], dtype=tl.float32)
    i_t, i_x = bos, bos * H + i_h
    for i_s in range(tl.cdiv(T_n, INTERVAL)):
        if states is not None:
            tl.store(p_s + tl.trans(state_offsets(o_k, o_v, K, V, True)), b_h, mask=m_h)
            p_s += H * K * V
        for _ in tl.range(i_s * INTERVAL, tl.minimum((i_s + 1) * INTERVAL, T_n), num_stages=STAGES):
            # [BK], [BV]
            b_q = tl.load(q + i_t * s_q + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_k = tl.load(k + i_t * s_k + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(v + i_t * s_v + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            if SCALAR_BETA:
                b_beta = tl.load(beta + i_x).to(tl.float32) + tl.zeros([BV], dtype=tl.float32)
            else:
                b_beta = tl.load(beta + i_x * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            if g is not None:
                if SCALAR_G:
                    b_h *= decays(tl.load(g + i_t * s_g + i_h))
                else:
                    b_h *= decays(tl.load(g + i_t * s_g + i_h * V + o_v, mask=m_v, other=0.0))[None, :]
            b_u = step_sizes(b_beta, tl.sum(b_k * b_k, 0), OPTIONS) * (b_v - sum_rows(b_k, b_h, ROWS))
            b_h = tl.fma(b_k[:, None], b_u[None, :], b_h)
            b_o = sum_rows(b_q, b_h, ROWS) * scale
            if D is not None:
                b_o += b_D * b_v
            if z is not None:
                b_z = tl.load(z + i_t * s_z + i_h * V + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_o *= b_z * sigmoid(b_z)
            if POOLED:
                b_o = tl.where(used, b_o, 0.0)
            tl.store(o + i_x * V + o_v, rounded(b_o, o.dtype.element_ty), mask=m_v)
            i_t += 1
            i_x += H
    if states is not None and IS_VARLEN:
        m_s = only_if(has_spare_slot(bos, bos + T_n, INTERVAL), m_h)
        tl.store(p_s + tl.trans(state_offsets(o_k, o_v, K, V, True)), tl.zeros([BK, BV], dtype=tl.float32), mask=m_s)
    if ht is not None:
        tl.store(ht + i_w * s_h + o_state, b_h, mask=m_w)


def fused_recurrent_longhorn_exact_fwd(
    args: Arguments, ht: torch.Tensor | None, states: torch.Tensor | None, pool: Pool | None,
) -> torch.Tensor:
    """Return `o`; write the final state to `ht` and the states for backward to `states`, where given."""
    B, T, H, K, V = args.sizes
    x, strides = strided_inputs(args, ('q', 'k', 'v', 'z', 'g'))
    kernel, config = fused_recurrent_longhorn_exact_fwd_kernel, for_recurrent(launch_key(x))
    o = x.v.new_empty(B, T, H, V)
    # the kernel says itself what is fused
    kernel[(H * x.num_sequences * triton.cdiv(V, config.BV),)](
        q=x.q,
        k=x.k,
        v=x.v,
        beta=x.beta,
        D=x.D,
        z=x.z,
        g=x.g,
        h0=x.initial_state if pool is None else pool.states,
        o=o,
        ht=ht,
        states=states,
        cu_seqlens=x.cu_seqlens,
        scale=x.scale,
        T=T,
        s_q=strides['S_Q'],
        s_k=strides['S_K'],
        s_v=strides['S_V'],
        s_z=strides['S_Z'],
        s_g=strides['S_G'],
        H=H,
        K=K,
        V=V,
        OPTIONS=x.step_options,
        SCALAR_BETA=x.beta.dim() == 3,
        SCALAR_G=is_scalar(x.g),
        STATE_V_FIRST=x.state_v_first,
        **row_arguments(pool, H * K * V),
        **config.of(kernel),
        **SAME_IN_ALL_LANES,
    )
    return o
