"""Exact update, the end of backward: the channel blocks' parts become dq and dk (and dbeta of a scalar step)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fla_longhorn.ops.exact_common import (
    CHUNK_SIZE,
    first_slot,
    product,
    ratio,
    rounded,
    sequence_of_slot,
    sequence_range,
    sigmoid,
    state_tile,
)


@triton.heuristics({'IS_VARLEN': lambda args: args['cu_seqlens'] is not None})
@triton.jit(do_not_specialize=['T', 'N', 'NV', 'TOKENS', 'SLOTS'])
def chunk_longhorn_exact_bwd_kernel_qk(
    q,
    k,
    beta,
    dqk,
    dam,
    dq,
    dk,
    dbeta,
    cu_seqlens,
    T,
    N,
    NV,
    TOKENS,
    SLOTS,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    USE_BETA_SIGMOID: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    """Sum the parts of the channel blocks in their order, and finish dq and dk of a chunk (and dbeta of a scalar step)."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    i_n = sequence_of_slot(cu_seqlens, i_c, T, N, BT, IS_VARLEN)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    i_t = (i_c - first_slot(bos, i_n, T, BT, IS_VARLEN)).to(tl.int32)
    if i_t * BT < T_n:
        o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
        m_k = (i_t * BT + o_t < T_n)[:, None] & (o_k < K)[None, :]
        i_x = (bos + i_t * BT) * H + i_h
        o_qk = i_x * K + o_t[:, None] * (H * K) + o_k[None, :]
        p_dqk = dqk + o_qk
        p_dam = dam + (i_c.to(tl.int64) * H + i_h) * (2 * BT * BT) + o_t[:, None] * BT + o_t[None, :]
        # [BT, BK], [BT, BT]
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        b_da = tl.zeros([BT, BT], dtype=tl.float32)
        b_m = tl.zeros([BT, BT], dtype=tl.float32)
        for _ in range(NV):
            b_dq += tl.load(p_dqk, mask=m_k, other=0.0)
            b_dk += tl.load(p_dqk + TOKENS.to(tl.int64) * H * K, mask=m_k, other=0.0)
            b_da += tl.load(p_dam)
            b_m += tl.load(p_dam + BT * BT)
            p_dqk += TOKENS.to(tl.int64) * 2 * H * K
            p_dam += SLOTS.to(tl.int64) * H * (2 * BT * BT)
        b_q = tl.load(q + o_qk, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_qk, mask=m_k, other=0.0).to(tl.float32)

        if SCALAR_BETA:
            # the parts hold X R^T, for the step is the row's
            m_t = i_t * BT + o_t < T_n
            b_b = tl.load(beta + i_x + o_t * H, mask=m_t, other=0.0).to(tl.float32)
            if USE_BETA_SIGMOID:
                b_b = sigmoid(b_b)
            b_f = ratio(1.0, 1.0 + b_b * tl.sum(b_k * b_k, 1))
            b_db = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_m, 0.0), 1) * b_f * b_f
            if USE_BETA_SIGMOID:
                b_db *= b_b * (1.0 - b_b)
            tl.store(dbeta + i_x + o_t * H, rounded(b_db, dbeta.dtype.element_ty), mask=m_t)
            b_e = b_b * b_f
            b_m *= b_e[:, None] * b_e[None, :]
        lower = o_t[:, None] >= o_t[None, :]
        b_da = tl.where(lower, b_da, 0.0)
        b_m = tl.where(lower, b_m, 0.0)
        b_dq = product(b_da, b_k, b_dq, 'ieee')
        b_dk = product(tl.trans(b_da), b_q, b_dk, 'ieee')
        b_dk = product(-(b_m + tl.trans(b_m)), b_k, b_dk, 'ieee')
        tl.store(dq + o_qk, rounded(b_dq, dq.dtype.element_ty), mask=m_k)
        tl.store(dk + o_qk, rounded(b_dk, dk.dtype.element_ty), mask=m_k)


def chunk_longhorn_exact_bwd_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    dqk: torch.Tensor,
    dam: torch.Tensor,
    dbeta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    use_beta_sigmoid: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq and dk from the parts `dqk [NV, 2, B, T, H, K]` and `dam [NV, slots, H, 2, C, C]`; fill in a scalar dbeta."""
    B, T, H, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    NV, slots = dam.shape[:2]
    BK = state_tile(K)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    chunk_longhorn_exact_bwd_kernel_qk[(slots, H)](
        q, k, beta, dqk, dam, dq, dk, dbeta, cu_seqlens, T, N, NV, B * T, slots, H=H, K=K, BT=CHUNK_SIZE, BK=BK,
        USE_BETA_SIGMOID=use_beta_sigmoid, SCALAR_BETA=beta.dim() == 3, num_warps=1 if BK <= 32 else 4,
    )
    return dq, dk
