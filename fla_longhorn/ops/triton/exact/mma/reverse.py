"""The exact update's reverse pass in the layout of tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import log2e
from fla_longhorn.ops.triton.exact.common import head_index_and_channels, padded, product, rounded
from fla_longhorn.ops.triton.exact.mma.common import (
    add_scaled,
    as_accumulators,
    load_accumulators,
    load_chunk,
    load_numbers,
    reciprocal,
    rounded_solve,
    steps_of,
    store_chunk,
)
from fla_longhorn.ops.triton.exact.mma.lanes import (
    by_columns,
    by_entries,
    load_columns,
    load_keys,
    load_operand,
    load_two_operands,
    side_by_side,
)
from fla_longhorn.ops.triton.exact.mma.operands import reverse_halves
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, sequence_range


@triton.jit
def steps_and_slopes(b_beta, b_n, OPTIONS: tl.constexpr):
    """E, and the factor of X U in the gradient of beta's logit; :func:`fla_longhorn.ops.triton.common.step_factors`."""
    if OPTIONS.use_beta_sigmoid_in_kernel:
        b_x = tl.exp2(b_beta * -log2e())
        b_f = reciprocal(b_x + (1.0 + b_n))
        return (2.0 if OPTIONS.allow_neg_eigval else 1.0) * b_f, tl.minimum(b_x, 3e38) * b_f
    else:
        b_e = steps_of(b_beta, b_n, OPTIONS)
        return b_e, b_e


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_mma(
    dy,
    dht,
    beta,
    D,
    g,
    operands,
    numbers,
    cs,
    ws,
    dhs,
    dv,
    dbeta,
    dh0,
    cu_seqlens,
    scale,
    T,
    N,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    BV: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    STORE_W: tl.constexpr,
):
    """As the general reverse pass (`../backward.py`), 16 tokens at a time."""
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    SLOPES: tl.constexpr = OPTIONS.use_beta_sigmoid_in_kernel
    BK: tl.constexpr = padded(K)
    # summed into dS, it changes its order of registers twice in each chunk; with 64 entries sums apart from it would spill
    APART: tl.constexpr = BK == 128
    i_h, i_n, i_v = head_index_and_channels(H, V, BV)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V)
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)[:, None]
    dy, ws, dv = dy + i_h * V, ws + i_h * V, dv + i_h * V
    if SCALAR_BETA:
        beta, o_beta = beta + i_h, tl.arange(0, 1)
    else:
        beta, dbeta, cs, o_beta = beta + i_h * V, dbeta + i_h * V, cs + i_h * V, o_v

    # [BV, BK]
    if dht is not None:
        b_dh = by_columns(load_state(dht + o_state, o_k, o_v, None, K, V, STATE_V_FIRST))
    else:
        b_dh = tl.zeros([BV, BK], dtype=tl.float32)
    NS, NT = tl.cdiv(T_n, SPAN), tl.cdiv(T_n, 16)
    i_chunk = (first_slot(bos, i_n, T, 16, IS_VARLEN) + NT - 1) * H + i_h
    p_operands, p_numbers = operands + i_chunk * reverse_halves(BK), numbers + i_chunk * 64
    p_dhs = dhs + ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + NS - 1) * H + i_h) * (PARTS * K * V)
    # the last chunk; in the loop, the one before is loaded before anything is stored
    i_t = tl.maximum(NT - 1, 0) * 16
    b_ya, b_yb = load_accumulators(dy, S.do, bos + i_t, o_v, T_n - i_t, V)
    b_ba, b_bb = load_chunk(beta, S.beta, bos + i_t, o_beta, T_n - i_t, V)
    b_ba, b_bb = b_ba.to(tl.float32), b_bb.to(tl.float32)
    if not SCALAR_BETA:
        b_ba, b_bb = as_accumulators(b_ba, b_bb)
    for j_s in range(NS):
        store_state(p_dhs, by_entries(b_dh), o_k, o_v, None, K, V, True, PARTS)
        p_dhs -= H * PARTS * K * V
        for _ in tl.range(tl.cdiv(tl.minimum(T_n - (NS - 1 - j_s) * SPAN, SPAN), 16), num_stages=1):
            i_x, left = bos + i_t, T_n - i_t
            b_ka, b_kb = load_keys(p_operands + 768 + 32 * BK, BK, 'tf32'), load_keys(p_operands + 768 + 40 * BK, BK, 'tf32')
            b_la, b_lb = load_two_operands(p_operands)
            b_aa, b_aba = load_two_operands(p_operands + 256)
            b_ab, b_lab = load_operand(p_operands + 512, 'bf16'), load_operand(p_operands + 640, 'bf16')
            if not SCALAR_BETA:
                b_ca, b_cb = load_chunk(cs, H * V, i_x, o_v, left, V)
            next_ba, next_bb = load_chunk(beta, S.beta, i_x - 16, o_beta, i_t, V)
            next_ya, next_yb = load_chunk(dy, S.do, i_x - 16, o_v, i_t, V)
            b_na, b_nb = load_numbers(p_numbers)
            b_ea, b_sa = steps_and_slopes(b_ba, b_na, OPTIONS)
            b_eb, b_sb = steps_and_slopes(b_bb, b_nb, OPTIONS)
            b_za, b_zb = rounded(b_ya, tl.bfloat16), rounded(b_yb, tl.bfloat16)
            # X^T [BV, 8]
            b_zero = tl.zeros([BV, 8], dtype=tl.float32)
            b_yaa, b_ybb = side_by_side(b_za, b_za, 'bf16'), side_by_side(b_zb, b_zb, 'bf16')
            if g is None:
                b_xb = product(b_ybb, b_ab, b_zero, 'bf16')
                b_xa = product(b_ybb, b_aba, product(b_yaa, b_aa, b_zero, 'bf16'), 'bf16')
                b_xb = product(b_dh, b_kb, b_xb, 'tf32')
                b_xa = product(b_dh, b_ka, b_xa, 'tf32')
            else:
                b_xb = product(b_dh, b_kb, b_zero, 'tf32')
                b_xa = product(b_dh, b_ka, b_zero, 'tf32')
                b_ua, b_ub = load_numbers(p_numbers + 32)
                b_xb = product(b_ybb, b_ab, b_xb * b_ub, 'bf16')
                b_xa = product(b_ybb, b_aba, product(b_yaa, b_aa, b_xa * b_ua, 'bf16'), 'bf16')
                b_ua, b_ub = load_numbers(p_numbers + 16)
            b_d = 1.0 if g is None else tl.load(p_numbers + 31)
            b_sum = tl.zeros([BV, BK], dtype=tl.float32) if APART else b_dh if g is None else b_dh * b_d
            b_k, b_q = load_columns(p_operands + 768, BK, 'bf16'), load_columns(p_operands + 768 + 16 * BK, BK, 'bf16')
            if g is not None:
                b_fa, b_fb = (b_ua, b_ub) if scale is None else (b_ua * scale, b_ub * scale)
                b_sum = add_scaled(b_sum, b_ya, b_yb, b_fa, b_fb, b_q)
            elif scale is not None:
                b_sum = add_scaled(b_sum, b_ya, b_yb, scale, scale, b_q)
            else:
                b_sum = product(side_by_side(b_za, b_zb, 'bf16'), b_q, b_sum, 'bf16')
            b_xb, b_vb, b_wb = rounded_solve(b_xb, b_eb, p_numbers + 52, b_lb, True)
            b_xa = product(side_by_side(b_wb, b_wb, 'bf16'), b_lab, b_xa, 'bf16')
            b_xa, b_va, b_wa = rounded_solve(b_xa, b_ea, p_numbers + 48, b_la, True)
            if g is None:
                b_sum = product(side_by_side(b_wa, b_wb, 'bf16'), b_k, b_sum, 'bf16')
            else:
                b_sum = add_scaled(b_sum, b_wa, b_wb, b_ua, b_ub, b_k)
            b_dh = tl.fma(b_dh, b_d, b_sum) if APART else b_sum
            if SCALAR_BETA:
                store_chunk(ws, H * V, i_x, o_v, left, V, b_xa, b_xb)
            elif STORE_W:
                store_chunk(ws, H * V, i_x, o_v, left, V, b_wa, b_wb)
            if b_D is not None:
                b_va, b_vb = b_va + b_D * b_ya, b_vb + b_D * b_yb
            store_chunk(dv, H * V, i_x, o_v, left, V, b_va, b_vb)
            if not SCALAR_BETA:
                b_ca, b_cb = b_ca.to(tl.float32), b_cb.to(tl.float32)
                if SLOPES:
                    b_ca, b_cb = b_ca * b_sa, b_cb * b_sb
                store_chunk(dbeta, H * V, i_x, o_v, left, V, b_xa * b_ca, b_xb * b_cb)
            b_ya, b_yb = next_ya.to(tl.float32), next_yb.to(tl.float32)
            b_ba, b_bb = next_ba.to(tl.float32), next_bb.to(tl.float32)
            p_operands -= H * reverse_halves(BK)
            p_numbers -= H * 64
            i_t -= 16
    if dh0 is not None:
        store_state(dh0 + o_state, by_entries(b_dh), o_k, o_v, None, K, V, STATE_V_FIRST)
