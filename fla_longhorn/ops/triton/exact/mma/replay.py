"""The exact update's replay in the layout of tensor cores, for a step per channel."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import log2e
from fla_longhorn.ops.triton.exact.common import head_index_and_channels, interval_of, padded, product, rounded
from fla_longhorn.ops.triton.exact.mma.common import (
    add_scaled,
    load_accumulators,
    load_chunk,
    load_numbers,
    pairs,
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
    state_operand,
)
from fla_longhorn.ops.triton.exact.mma.operands import reverse_halves
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, locate_slot, num_slots


@triton.jit
def skip_and_silu_gradients(b_do, b_o, b_D, b_v, b_z):
    """dY and dZ of minus O; D may be None."""
    b_sig = reciprocal(1.0 + tl.exp2(b_z * -log2e()))
    b_silu = b_z * b_sig
    b_y = -b_o if b_D is None else b_D * b_v - b_o
    return b_do * b_silu, b_do * b_y * (b_sig + b_silu * (1.0 - b_sig))


@triton.jit
def factor_of_x(b_r, b_beta, b_n, OPTIONS: tl.constexpr):
    """`cs`: R times the slope of the step sizes by beta."""
    b_f = reciprocal(1.0 + b_beta * b_n)
    return (2.0 if OPTIONS.allow_neg_eigval else 1.0) * b_r * b_f * b_f


@triton.jit
def in_pairs(b_w):
    """U in bfloat16, in the layout that a solve leaves it in."""
    b_w0, b_w1 = pairs(b_w)
    return tl.reshape(tl.join(b_w0.to(tl.bfloat16), b_w1.to(tl.bfloat16)), b_w.shape)


@triton.jit
def residuals(b_x, b_w, p_pairs, b_l):
    """`X - L W` of 8 tokens `[BV, 8]`, of W that is known."""
    b_g = tl.load(p_pairs + tl.arange(0, 4))[None, :]
    b_x0, b_x1 = pairs(product(side_by_side(b_w, b_w, 'bf16'), b_l, b_x, 'bf16'))
    b_w0, _ = pairs(b_w.to(tl.float32))
    return tl.reshape(tl.join(b_x0, b_x1 - b_g * b_w0), b_x.shape)


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_bwd_kernel_replay_mma(
    v,
    beta,
    D,
    z,
    g,
    do,
    operands,
    numbers,
    states,
    us,
    cs,
    hs,
    dD,
    dy,
    dz,
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
    GIVEN: tl.constexpr,
):
    """As the general replay (`../replay.py`), 16 tokens at a time, with `h = -S [BV, BK]`; with GIVEN, `us` has U already."""
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    INTERVAL: tl.constexpr = interval_of(K)
    BK: tl.constexpr = padded(K)
    FORWARD: tl.constexpr = 768 + 48 * BK
    # R, from which U or `cs` follows
    RESIDUALS: tl.constexpr = not GIVEN or cs is not None
    VALUES: tl.constexpr = RESIDUALS or D is not None
    # with 128 entries there are registers for sums apart from the state, which else changes their order twice in each chunk,
    # and for the next chunk's z and dO as accumulators
    WIDE: tl.constexpr = BK == 128
    i_h, i_c, i_v = head_index_and_channels(H, V, BV)
    i_n, bos, T_n, t_0 = locate_slot(cu_seqlens, i_c, T, N, INTERVAL, IS_VARLEN)
    # tokens of this interval, none in an unused slot
    T_i = tl.maximum(tl.minimum(T_n - t_0, INTERVAL), 0).to(tl.int32)
    i_chunk = (first_slot(bos, i_n, T, 16, IS_VARLEN) + t_0 // 16) * H + i_h
    p_operands, p_numbers = operands + i_chunk * reverse_halves(BK), numbers + i_chunk * 64
    p_hs = hs + ((first_slot(bos, i_n, T, SPAN, IS_VARLEN) + t_0 // SPAN) * H + i_h) * (PARTS * K * V)
    bos += t_0
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    v, beta, us, do, dy = v + i_h * V, beta + i_h * V, us + i_h * V, do + i_h * V, dy + i_h * V
    if z is not None:
        z, dz = z + i_h * V, dz + i_h * V
    if cs is not None:
        cs += i_h * V
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)[:, None]
        b_dD = tl.zeros([BV, 8], dtype=tl.float32)
    b_h = by_columns(-load_state(states + (i_c.to(tl.int64) * H + i_h) * (K * V), o_k, o_v, T_i > 0, K, V, True))
    # of both halves; a chunk's tiles are loaded before anything of the last one is stored
    b_va, b_vb = None, None
    if VALUES:
        b_va, b_vb = load_accumulators(v, S.v, bos, o_v, T_i, V)
    if RESIDUALS:
        b_ba, b_bb = load_accumulators(beta, S.beta, bos, o_v, T_i, V)
    if GIVEN:
        b_wa, b_wb = load_accumulators(us, H * V, bos, o_v, T_i, V)
    if WIDE and (D is not None or z is not None):
        b_doa, b_dob = load_accumulators(do, S.do, bos, o_v, T_i, V)
    if WIDE and z is not None:
        b_za, b_zb = load_accumulators(z, S.z, bos, o_v, T_i, V)
    for i_s in range(0, T_i, SPAN):
        store_state(p_hs, by_entries(-b_h), o_k, o_v, None, K, V, True, PARTS)
        p_hs += H * PARTS * K * V
        for i_t in tl.range(i_s, tl.minimum(i_s + SPAN, T_i), 16, num_stages=1):
            i_x, left = bos + i_t, T_i - i_t
            p_keys, p_forward = p_operands + 768 + 32 * BK, p_operands + FORWARD
            if RESIDUALS:
                b_ka, b_kb = load_keys(p_keys, BK, 'tf32'), load_keys(p_keys + 8 * BK, BK, 'tf32')
                next_ba, next_bb = load_chunk(beta, S.beta, i_x + 16, o_v, left - 16, V)
            if VALUES:
                next_va, next_vb = load_chunk(v, S.v, i_x + 16, o_v, left - 16, V)
            if GIVEN:
                next_wa, next_wb = load_chunk(us, H * V, i_x + 16, o_v, left - 16, V)
            if RESIDUALS:
                b_na, b_nb = load_numbers(p_numbers)
                b_la, b_lb = load_two_operands(p_forward)
                b_lab = load_operand(p_forward + 512, 'bf16')
            # this chunk's, or the next one's
            AHEAD: tl.constexpr = 16 if WIDE else 0
            if D is not None or z is not None:
                next_doa, next_dob = load_chunk(do, S.do, i_x + AHEAD, o_v, left - AHEAD, V)
            if z is not None:
                b_qa, b_qb = load_keys(p_forward + 640, BK, 'bf16'), load_keys(p_forward + 640 + 8 * BK, BK, 'bf16')
                b_aa, b_ab = load_two_operands(p_forward + 256)
                next_za, next_zb = load_chunk(z, S.z, i_x + AHEAD, o_v, left - AHEAD, V)
            if not GIVEN:
                b_ea, b_eb = steps_of(b_ba, b_na, OPTIONS), steps_of(b_bb, b_nb, OPTIONS)
            b_zero = tl.zeros([BV, 8], dtype=tl.float32)
            if g is not None:
                b_ua, b_ub = load_numbers(p_numbers + 16)
            # dbeta is a small difference of V and K S
            if RESIDUALS and g is None:
                b_ra, b_rb = product(b_h, b_ka, b_va, 'tf32'), product(b_h, b_kb, b_vb, 'tf32')
            elif RESIDUALS:
                b_ra = product(b_h, b_ka, b_zero, 'tf32') * b_ua + b_va
                b_rb = product(b_h, b_kb, b_zero, 'tf32') * b_ub + b_vb
            if z is not None:
                b_s = state_operand(rounded(b_h, tl.bfloat16))
                b_oa, b_ob = product(b_s, b_qa, b_zero, 'bf16'), product(b_s, b_qb, b_zero, 'bf16')
                if scale is not None:
                    # A was multiplied by it already
                    b_oa, b_ob = b_oa * scale, b_ob * scale
                if g is not None:
                    b_oa, b_ob = b_oa * b_ua, b_ob * b_ub
            b_k = load_columns(p_operands + 768, BK, 'bf16')
            if GIVEN:
                b_wa, b_wb = in_pairs(b_wa), in_pairs(b_wb)
                if RESIDUALS:
                    b_ra = residuals(b_ra, b_wa, p_numbers + 48, b_la)
                    b_rb = product(side_by_side(b_wa, b_wa, 'bf16'), b_lab, b_rb, 'bf16')
                    b_rb = residuals(b_rb, b_wb, p_numbers + 52, b_lb)
            else:
                b_ra, _, b_wa = rounded_solve(b_ra, b_ea, p_numbers + 48, b_la, False)
                b_rb = product(side_by_side(b_wa, b_wa, 'bf16'), b_lab, b_rb, 'bf16')
                b_rb, _, b_wb = rounded_solve(b_rb, b_eb, p_numbers + 52, b_lb, False)
            b_w = side_by_side(b_wa, b_wb, 'bf16')
            if z is not None:
                b_oa, b_ob = product(b_w, b_aa, b_oa, 'bf16'), product(b_w, b_ab, b_ob, 'bf16')
            b_d = 1.0 if g is None else tl.load(p_numbers + 31)
            b_sum = tl.zeros([BV, BK], dtype=tl.float32) if WIDE else b_h if g is None else b_h * b_d
            if g is None:
                b_sum = product(b_w, b_k, b_sum, 'bf16')
            else:
                b_ua, b_ub = load_numbers(p_numbers + 32)
                b_sum = add_scaled(b_sum, b_wa, b_wb, b_ua, b_ub, b_k)
            b_h = tl.fma(b_h, b_d, b_sum) if WIDE else b_sum
            if not GIVEN:
                store_chunk(us, H * V, i_x, o_v, left, V, b_wa, b_wb)
            if cs is not None:
                b_ra, b_rb = factor_of_x(b_ra, b_ba, b_na, OPTIONS), factor_of_x(b_rb, b_bb, b_nb, OPTIONS)
                store_chunk(cs, H * V, i_x, o_v, left, V, b_ra, b_rb)
            if D is not None or z is not None:
                if not WIDE:
                    b_doa, b_dob = next_doa.to(tl.float32), next_dob.to(tl.float32)
                if z is not None:
                    if not WIDE:
                        b_za, b_zb = next_za.to(tl.float32), next_zb.to(tl.float32)
                    b_doa, b_za = skip_and_silu_gradients(b_doa, b_oa, b_D, b_va, b_za)
                    b_dob, b_zb = skip_and_silu_gradients(b_dob, b_ob, b_D, b_vb, b_zb)
                    store_chunk(dy, H * V, i_x, o_v, left, V, b_doa, b_dob)
                    store_chunk(dz, H * V, i_x, o_v, left, V, b_za, b_zb)
                if D is not None:
                    b_dD += b_doa * b_va + b_dob * b_vb
            if WIDE and (D is not None or z is not None):
                b_doa, b_dob = next_doa.to(tl.float32), next_dob.to(tl.float32)
            if WIDE and z is not None:
                b_za, b_zb = next_za.to(tl.float32), next_zb.to(tl.float32)
            if VALUES:
                b_va, b_vb = next_va.to(tl.float32), next_vb.to(tl.float32)
            if RESIDUALS:
                b_ba, b_bb = next_ba.to(tl.float32), next_bb.to(tl.float32)
            if GIVEN:
                b_wa, b_wb = next_wa.to(tl.float32), next_wb.to(tl.float32)
            p_operands += H * reverse_halves(BK)
            p_numbers += H * 64
    if g is not None:
        i_end = num_slots(T, N, SPAN, IS_VARLEN) + i_n
        is_last = (T_i > 0) & (t_0 + INTERVAL >= T_n)
        store_state(hs + (i_end * H + i_h) * (PARTS * K * V), by_entries(-b_h), o_k, o_v, is_last, K, V, True, PARTS)
    if D is not None:
        tl.store(dD + (i_c.to(tl.int64) * H + i_h) * V + o_v, tl.sum(b_dD, 1), mask=o_v < V)
