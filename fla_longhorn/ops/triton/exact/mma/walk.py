"""The exact update's replay and reverse pass in one, given the updates that the forward kept."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.exact.common import head_index_and_channels, padded, product, rounded
from fla_longhorn.ops.triton.exact.mma.common import (
    add_scaled,
    load_accumulators,
    load_chunk,
    load_numbers,
    rounded_solve,
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
    state_operand,
)
from fla_longhorn.ops.triton.exact.mma.operands import reverse_halves
from fla_longhorn.ops.triton.exact.mma.replay import factor_of_x, residuals, skip_and_silu_gradients
from fla_longhorn.ops.triton.exact.mma.reverse import steps_and_slopes
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, sequence_range


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_walk(
    v,
    beta,
    D,
    z,
    do,
    dht,
    us,
    operands,
    numbers,
    states,
    hs,
    dhs,
    ws,
    dD,
    dy,
    dz,
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
    STATE_V_FIRST: tl.constexpr,
    STORE_W: tl.constexpr,
):
    """What `replay.py` and `reverse.py` compute of one block of channels of one sequence, from its end.

    The state walks back beside its gradient, from the one behind the sequence in `states`: `S <- S - K^T U`, of the very U
    that the forward added.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    SLOPES: tl.constexpr = OPTIONS.use_beta_sigmoid_in_kernel
    VALUES: tl.constexpr = D is not None or not SLOPES
    BK: tl.constexpr = padded(K)
    i_h, i_n, i_v = head_index_and_channels(H, V, BV)
    bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_state = (i_n.to(tl.int64) * H + i_h) * (K * V)
    beta, us, do, dv, dbeta = beta + i_h * V, us + i_h * V, do + i_h * V, dv + i_h * V, dbeta + i_h * V
    ws = ws + i_h * V
    if z is not None:
        z, dz, dy = z + i_h * V, dz + i_h * V, dy + i_h * V
    if VALUES:
        v += i_h * V
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)[:, None]
        b_dD = tl.zeros([BV, 8], dtype=tl.float32)
    # [BV, BK]
    b_s = by_columns(load_state(states + o_state, o_k, o_v, None, K, V, True))
    if dht is not None:
        b_dh = by_columns(load_state(dht + o_state, o_k, o_v, None, K, V, STATE_V_FIRST))
    else:
        b_dh = tl.zeros([BV, BK], dtype=tl.float32)
    NS, NT = tl.cdiv(T_n, SPAN), tl.cdiv(T_n, 16)
    i_chunk = (first_slot(bos, i_n, T, 16, IS_VARLEN) + NT - 1) * H + i_h
    p_operands, p_numbers = operands + i_chunk * reverse_halves(BK), numbers + i_chunk * 64
    o_span = ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + NS - 1) * H + i_h) * (PARTS * K * V)
    # the last chunk
    i_t = tl.maximum(NT - 1, 0) * 16
    b_ya, b_yb = load_accumulators(do, S.do, bos + i_t, o_v, T_n - i_t, V)
    b_ba, b_bb = load_accumulators(beta, S.beta, bos + i_t, o_v, T_n - i_t, V)
    b_ua, b_ub = load_accumulators(us, H * V, bos + i_t, o_v, T_n - i_t, V)
    b_va, b_vb = None, None
    if VALUES:
        b_va, b_vb = load_accumulators(v, S.v, bos + i_t, o_v, T_n - i_t, V)
    if z is not None:
        b_za, b_zb = load_accumulators(z, S.z, bos + i_t, o_v, T_n - i_t, V)
    for j_s in range(NS):
        store_state(dhs + o_span, by_entries(b_dh), o_k, o_v, None, K, V, True, PARTS)
        for _ in tl.range(tl.cdiv(tl.minimum(T_n - (NS - 1 - j_s) * SPAN, SPAN), 16), num_stages=1):
            i_x, left = bos + i_t, T_n - i_t
            p_forward = p_operands + 768 + 48 * BK
            b_ka, b_kb = load_keys(p_operands + 768 + 32 * BK, BK, 'tf32'), load_keys(p_operands + 768 + 40 * BK, BK, 'tf32')
            b_k = load_columns(p_operands + 768, BK, 'bf16')
            if z is not None:
                b_qa, b_qb = load_keys(p_forward + 640, BK, 'bf16'), load_keys(p_forward + 640 + 8 * BK, BK, 'bf16')
                b_aa, b_ab = load_two_operands(p_forward + 256)
            b_na, b_nb = load_numbers(p_numbers)
            b_zero = tl.zeros([BV, 8], dtype=tl.float32)
            # X^T [BV, 8]
            b_xa, b_xb = product(b_dh, b_ka, b_zero, 'tf32'), product(b_dh, b_kb, b_zero, 'tf32')
            # the state at the chunk's start
            b_wa, b_wb = b_ua.to(tl.bfloat16), b_ub.to(tl.bfloat16)
            b_u = side_by_side(b_wa, b_wb, 'bf16')
            b_s = product(b_u, b_k, b_s, 'bf16')
            if z is not None:
                b_h = state_operand(rounded(-b_s, tl.bfloat16))
                b_oa, b_ob = product(b_h, b_qa, b_zero, 'bf16'), product(b_h, b_qb, b_zero, 'bf16')
                if scale is not None:
                    # A was multiplied by it already
                    b_oa, b_ob = b_oa * scale, b_ob * scale
                b_oa, b_ob = product(b_u, b_aa, b_oa, 'bf16'), product(b_u, b_ab, b_ob, 'bf16')
                b_ya, b_za = skip_and_silu_gradients(b_ya, b_oa, b_D, b_va, b_za)
                b_yb, b_zb = skip_and_silu_gradients(b_yb, b_ob, b_D, b_vb, b_zb)
                store_chunk(dz, H * V, i_x, o_v, left, V, b_za, b_zb)
                store_chunk(dy, H * V, i_x, o_v, left, V, b_ya, b_yb)
            if D is not None:
                b_dD += b_ya * b_va + b_yb * b_vb
            # dbeta's factor
            b_ea, b_ca = steps_and_slopes(b_ba, b_na, OPTIONS)
            b_eb, b_cb = steps_and_slopes(b_bb, b_nb, OPTIONS)
            if SLOPES:
                b_ca, b_cb = b_ca * b_ua, b_cb * b_ub
            else:
                b_la, b_lb = load_two_operands(p_forward)
                b_ra, b_rb = product(-b_s, b_ka, b_va, 'tf32'), product(-b_s, b_kb, b_vb, 'tf32')
                b_ra = residuals(b_ra, b_wa, p_numbers + 48, b_la)
                b_rb = product(side_by_side(b_wa, b_wa, 'bf16'), load_operand(p_forward + 512, 'bf16'), b_rb, 'bf16')
                b_rb = residuals(b_rb, b_wb, p_numbers + 52, b_lb)
                b_ca, b_cb = factor_of_x(b_ra, b_ba, b_na, OPTIONS), factor_of_x(b_rb, b_bb, b_nb, OPTIONS)
            b_la, b_lb = load_two_operands(p_operands)
            b_aa, b_aba = load_two_operands(p_operands + 256)
            b_ab, b_lab = load_operand(p_operands + 512, 'bf16'), load_operand(p_operands + 640, 'bf16')
            b_za, b_zb = rounded(b_ya, tl.bfloat16), rounded(b_yb, tl.bfloat16)
            b_yaa, b_ybb = side_by_side(b_za, b_za, 'bf16'), side_by_side(b_zb, b_zb, 'bf16')
            b_xb = product(b_ybb, b_ab, b_xb, 'bf16')
            b_xa = product(b_ybb, b_aba, product(b_yaa, b_aa, b_xa, 'bf16'), 'bf16')
            b_q = load_columns(p_operands + 768 + 16 * BK, BK, 'bf16')
            if scale is not None:
                b_dh = add_scaled(b_dh, b_ya, b_yb, scale, scale, b_q)
            else:
                b_dh = product(side_by_side(b_za, b_zb, 'bf16'), b_q, b_dh, 'bf16')
            b_xb, b_gb, b_wb = rounded_solve(b_xb, b_eb, p_numbers + 52, b_lb, True)
            # the chunk before, so late because of registers
            next_ua, next_ub = load_chunk(us, H * V, i_x - 16, o_v, i_t, V)
            next_ba, next_bb = load_chunk(beta, S.beta, i_x - 16, o_v, i_t, V)
            next_ya, next_yb = load_chunk(do, S.do, i_x - 16, o_v, i_t, V)
            if VALUES:
                next_va, next_vb = load_chunk(v, S.v, i_x - 16, o_v, i_t, V)
            if z is not None:
                next_za, next_zb = load_chunk(z, S.z, i_x - 16, o_v, i_t, V)
            b_xa = product(side_by_side(b_wb, b_wb, 'bf16'), b_lab, b_xa, 'bf16')
            b_xa, b_ga, b_wa = rounded_solve(b_xa, b_ea, p_numbers + 48, b_la, True)
            b_dh = product(side_by_side(b_wa, b_wb, 'bf16'), b_k, b_dh, 'bf16')
            store_chunk(dbeta, H * V, i_x, o_v, left, V, b_xa * b_ca, b_xb * b_cb)
            if STORE_W:
                store_chunk(ws, H * V, i_x, o_v, left, V, b_wa, b_wb)
            if b_D is not None:
                b_ga, b_gb = b_ga + b_D * b_ya, b_gb + b_D * b_yb
            store_chunk(dv, H * V, i_x, o_v, left, V, b_ga, b_gb)
            b_ya, b_yb = next_ya.to(tl.float32), next_yb.to(tl.float32)
            b_ba, b_bb = next_ba.to(tl.float32), next_bb.to(tl.float32)
            b_ua, b_ub = next_ua.to(tl.float32), next_ub.to(tl.float32)
            if VALUES:
                b_va, b_vb = next_va.to(tl.float32), next_vb.to(tl.float32)
            if z is not None:
                b_za, b_zb = next_za.to(tl.float32), next_zb.to(tl.float32)
            p_operands -= H * reverse_halves(BK)
            p_numbers -= H * 64
            i_t -= 16
        store_state(hs + o_span, by_entries(b_s), o_k, o_v, None, K, V, True, PARTS)
        o_span -= H * PARTS * K * V
    if dh0 is not None:
        store_state(dh0 + o_state, by_entries(b_dh), o_k, o_v, None, K, V, STATE_V_FIRST)
    if D is not None:
        tl.store(dD + (i_n.to(tl.int64) * H + i_h) * V + o_v, tl.sum(b_dD, 1), mask=o_v < V)
