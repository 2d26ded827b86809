"""The exact update's forward in the layout of tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import interpreting, log2e
from fla_longhorn.ops.triton.exact.common import head_index_and_channels, interval_of, padded, product, rounded, split
from fla_longhorn.ops.triton.exact.mma.common import (
    add_scaled,
    as_accumulators,
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
from fla_longhorn.ops.triton.exact.mma.operands import floats, halves, reverse_halves
from fla_longhorn.ops.triton.exact.state import load_state, store_state
from fla_longhorn.ops.triton.slots import first_slot, has_spare_slot, locate_slot, locate_states, sequence_range


@triton.constexpr_function
def cut_factor():
    """Cuts numbers to tf32 without a mean error: a cut takes 2^-11 to 2^-12 of a number."""
    return 1.0 if interpreting() else 1.0 + 0.72 * 2**-11


@triton.jit
def cut(b_x):
    """To tf32, as a product cuts its operands on CUDA."""
    if interpreting():
        return b_x
    else:
        return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def solve(b_x, b_e, p_pairs, b_l):
    r"""`U = E (X - L U)` of 8 tokens `[BV, 8]`: a lane solves its pair of tokens, 3 rounds hand it to later pairs.

    Each round starts from the same X, so that after round n the first n + 1 pairs are right, and zeros keep later tokens out
    of earlier ones. Products cut U to tf32, that with L as all others, so that later tokens correct what is cut.
    """
    b_g = tl.load(p_pairs + tl.arange(0, 4))[None, :]
    b_e0, b_e1 = pairs(b_e)
    b_e0, b_e1 = b_e0 * cut_factor(), b_e1 * cut_factor()
    b_c = -b_e1 * b_g
    b_u = solve_pairs(b_x, b_e0, b_e1, b_c)
    for _ in tl.static_range(3):
        b_u = solve_pairs(product(side_by_side(b_u, b_u, 'tf32'), b_l, b_x, 'tf32'), b_e0, b_e1, b_c)
    return b_u


@triton.jit
def solve_pairs(b_r, b_e0, b_e1, b_c):
    b_r0, b_r1 = pairs(b_r)
    # the pair's second token corrects what products cut of the first
    b_u0 = cut(b_e0 * b_r0)
    b_u1 = b_c * b_u0 + b_e1 * b_r1
    return tl.reshape(tl.join(b_u0, b_u1), b_r.shape)


@triton.jit
def skip_and_silu(b_o, b_D, b_v, b_z):
    """`(D V - O) silu(Z)`; D and Z may be None."""
    if b_D is None:
        b_o = -b_o
    else:
        b_o = b_D * b_v - b_o
    if b_z is None:
        return b_o
    else:
        return b_o * (b_z * reciprocal(1.0 + tl.exp2(b_z * -log2e())))


@triton.jit(do_not_specialize=['T', 'N'])
def chunk_longhorn_exact_fwd_kernel_mma(
    v,
    beta,
    D,
    z,
    g,
    operands,
    numbers,
    h0,
    o,
    ht,
    states,
    ends,
    updates,
    cu_seqlens,
    scale,
    T,
    N,
    state_indices,
    final_state_indices,
    has_initial_state,
    pad_slot_id,
    s_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    BV: tl.constexpr,
    OPTIONS: tl.constexpr,
    SCALAR_BETA: tl.constexpr,
    STATE_V_FIRST: tl.constexpr,
    POOLED: tl.constexpr,
    OUTPUT: tl.constexpr,
    BY_INTERVAL: tl.constexpr,
):
    """As the general forward kernel (`../forward.py`), 16 tokens at a time, with `h = -S [BV, BK]`, in columns' order.

    With `updates`, U is rounded to bfloat16 and stored there: the state and later tokens see what backward sees. Operands are
    those of backward then. `ends` is for the states behind the sequences.
    """
    IS_VARLEN: tl.constexpr = cu_seqlens is not None
    INTERVAL: tl.constexpr = interval_of(K)
    BK: tl.constexpr = padded(K)
    SAVE_STATES: tl.constexpr = states is not None and not BY_INTERVAL
    SILU: tl.constexpr = OUTPUT and z is not None
    KEPT: tl.constexpr = updates is not None
    # of products with U
    UPDATE: tl.constexpr = 'bf16' if KEPT else 'tf32'
    # how keys read the state: where no decay forgets it, their repetitions keep what is read wrong
    DOT: tl.constexpr = 'tf32' if g is None else 'bf16'
    # summed into a state that products read as tf32, it changes its order of registers twice in each chunk
    APART: tl.constexpr = g is None and BK == 128
    i_h, i_c, i_v = head_index_and_channels(H, V, BV)
    i_n = i_c
    if BY_INTERVAL:
        i_n, bos, T_n, t_0 = locate_slot(cu_seqlens, i_c, T, N, INTERVAL, IS_VARLEN)
        # an unused slot has no tokens
        T_n = tl.maximum(tl.minimum(T_n - t_0, INTERVAL), 0).to(tl.int32)
    i_r = i_n.to(tl.int64)
    i_w = i_r
    if POOLED:
        i_r, i_w, read, written, used = locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id)
        if not used:
            return
    if BY_INTERVAL:
        i_chunk = (first_slot(bos, i_n, T, 16, IS_VARLEN) + t_0 // 16) * H + i_h
        bos += t_0
    else:
        bos, T_n = sequence_range(cu_seqlens, i_n, T, IS_VARLEN)
        i_chunk = first_slot(bos, i_n, T, 16, IS_VARLEN) * H + i_h
    HALVES: tl.constexpr = reverse_halves(BK) if KEPT else halves(BK)
    FLOATS: tl.constexpr = 64 if KEPT else floats(BK)
    p_operands = operands + i_chunk * HALVES
    p_numbers = numbers + i_chunk * FLOATS
    KEYS: tl.constexpr = 768 + 32 * BK if KEPT else 0
    QUERIES: tl.constexpr = 1408 + 48 * BK if KEPT else 16 * BK
    TOKENS: tl.constexpr = 0 if KEPT else 640 + 16 * BK
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    v, o = v + i_h * V, o + i_h * V
    if SCALAR_BETA:
        beta, o_beta = beta + i_h, tl.arange(0, 1)
    else:
        beta, o_beta = beta + i_h * V, o_v
    if z is not None:
        z += i_h * V
    if KEPT:
        updates += i_h * V
    b_D = None
    if D is not None:
        b_D = tl.load(D + i_h * V + o_v, mask=o_v < V, other=0.0).to(tl.float32)[:, None]

    if BY_INTERVAL:
        b_h = by_columns(-load_state(states + (i_c.to(tl.int64) * H + i_h) * (K * V), o_k, o_v, T_n > 0, K, V, True))
    elif h0 is not None:
        b_h = by_columns(-load_state(h0 + i_r * s_h + i_h * (K * V), o_k, o_v, read if POOLED else None, K, V, STATE_V_FIRST))
    else:
        b_h = tl.zeros([BV, BK], dtype=tl.float32)
    if SAVE_STATES:
        p_s = states + (first_slot(bos, i_n, T, INTERVAL, IS_VARLEN) * H + i_h) * (K * V)

    # of both halves; a chunk's tiles are loaded before the last one's output is stored
    b_va, b_vb = load_accumulators(v, S.v, bos, o_v, T_n, V)
    b_za, b_zb = None, None
    if SILU:
        b_za, b_zb = load_accumulators(z, S.z, bos, o_v, T_n, V)
    b_ba, b_bb = load_chunk(beta, S.beta, bos, o_beta, T_n, V)
    if not SCALAR_BETA:
        b_ba, b_bb = as_accumulators(b_ba, b_bb)
    b_ba, b_bb = b_ba.to(tl.float32), b_bb.to(tl.float32)
    for i_s in range(0, T_n, INTERVAL):
        if SAVE_STATES:
            store_state(p_s, by_entries(-b_h), o_k, o_v, None, K, V, True)
            p_s += H * K * V
        for i_t in tl.range(i_s, tl.minimum(i_s + INTERVAL, T_n), 16, num_stages=1):
            i_x, left = bos + i_t, T_n - i_t
            b_ka, b_kb = load_keys(p_operands + KEYS, BK, DOT), load_keys(p_operands + KEYS + 8 * BK, BK, DOT)
            if OUTPUT:
                b_qa = load_keys(p_operands + QUERIES, BK, 'bf16')
                b_qb = load_keys(p_operands + QUERIES + 8 * BK, BK, 'bf16')
            if KEPT:
                p_forward = p_operands + 768 + 48 * BK
                b_la, b_lb = load_two_operands(p_forward)
                if OUTPUT:
                    b_aa, b_ab = load_two_operands(p_forward + 256)
                    b_resta, b_restb = load_two_operands(p_forward + 640 + 16 * BK)
                b_lab = load_operand(p_forward + 512, 'bf16')
            else:
                b_la, b_lb = load_operand(p_numbers, 'tf32'), load_operand(p_numbers + 128, 'tf32')
                if OUTPUT:
                    b_aa, b_ab = load_operand(p_numbers + 384, 'tf32'), load_operand(p_numbers + 512, 'tf32')
                b_lab = load_operand(p_numbers + 256, 'tf32')
            # the next chunk's
            next_ba, next_bb = load_chunk(beta, S.beta, i_x + 16, o_beta, left - 16, V)
            next_va, next_vb = load_chunk(v, S.v, i_x + 16, o_v, left - 16, V)
            if SILU:
                next_za, next_zb = load_chunk(z, S.z, i_x + 16, o_v, left - 16, V)
            b_na, b_nb = load_numbers(p_numbers + TOKENS)
            b_ea, b_eb = steps_of(b_ba, b_na, OPTIONS), steps_of(b_bb, b_nb, OPTIONS)
            b_zero = tl.zeros([BV, 8], dtype=tl.float32)
            b_s = state_operand(rounded(b_h, tl.bfloat16))
            if g is None:
                # the product cuts the state: one key, repeated, would else make the state larger by what is cut
                b_ra = tl.fma(product(b_h, b_ka, b_zero, DOT), cut_factor(), b_va)
                b_rb = tl.fma(product(b_h, b_kb, b_zero, DOT), cut_factor(), b_vb)
            else:
                b_ua, b_ub = load_numbers(p_numbers + TOKENS + 16)
                b_ra = product(b_s, b_ka, b_zero, DOT) * b_ua + b_va
                b_rb = product(b_s, b_kb, b_zero, DOT) * b_ub + b_vb
            if OUTPUT:
                b_oa, b_ob = product(b_s, b_qa, b_zero, 'bf16'), product(b_s, b_qb, b_zero, 'bf16')
                if KEPT and scale is not None:
                    # A was multiplied by it already
                    b_oa, b_ob = b_oa * scale, b_ob * scale
                if g is not None:
                    b_oa, b_ob = b_oa * b_ua, b_ob * b_ub
            if KEPT:
                b_k = load_columns(p_operands + 768, BK, 'bf16')
                _, _, b_wa = rounded_solve(b_ra, b_ea, p_numbers + 48, b_la, False)
            else:
                b_k = load_columns(p_numbers + 640, BK, 'tf32')
                b_wa = solve(b_ra, b_ea, p_numbers + TOKENS + 48, b_la)
            b_rb = product(side_by_side(b_wa, b_wa, UPDATE), b_lab, b_rb, UPDATE)
            if KEPT:
                _, _, b_wb = rounded_solve(b_rb, b_eb, p_numbers + 52, b_lb, False)
            else:
                b_wb = solve(b_rb, b_eb, p_numbers + TOKENS + 52, b_lb)
            if OUTPUT:
                b_w = side_by_side(b_wa, b_wb, UPDATE)
                b_oa, b_ob = product(b_w, b_aa, b_oa, UPDATE), product(b_w, b_ab, b_ob, UPDATE)
                if KEPT:
                    b_oa, b_ob = product(b_w, b_resta, b_oa, UPDATE), product(b_w, b_restb, b_ob, UPDATE)
                    store_chunk(updates, H * V, i_x, o_v, left, V, b_wa, b_wb)
            if KEPT and g is not None:
                b_ua, b_ub = load_numbers(p_numbers + 32)
                b_h = add_scaled(b_h * tl.load(p_numbers + 31), b_wa, b_wb, b_ua, b_ub, b_k)
            elif g is not None:
                b_ua, b_ub = load_numbers(p_numbers + TOKENS + 32)
                # decayed, what later tokens saw of U has more digits than one part
                b_wa, b_resta = split(cut(b_wa) * b_ua, 'tf32')
                b_wb, b_restb = split(cut(b_wb) * b_ub, 'tf32')
                b_h *= tl.load(p_numbers + TOKENS + 31)
                b_h = product(side_by_side(b_resta, b_restb, 'tf32'), b_k, b_h, 'tf32')
                b_h = product(side_by_side(b_wa, b_wb, 'tf32'), b_k, b_h, 'tf32')
            else:
                b_sum = tl.zeros([BV, BK], dtype=tl.float32) if APART else b_h
                b_sum = product(side_by_side(b_wa, b_wb, UPDATE), b_k, b_sum, UPDATE)
                b_h = tl.fma(b_h, 1.0, b_sum) if APART else b_sum
            if OUTPUT:
                if scale is not None and not KEPT:
                    b_oa, b_ob = b_oa * scale, b_ob * scale
                b_oa, b_ob = skip_and_silu(b_oa, b_D, b_va, b_za), skip_and_silu(b_ob, b_D, b_vb, b_zb)
                store_chunk(o, H * V, i_x, o_v, left, V, b_oa, b_ob)
            b_va, b_vb = next_va.to(tl.float32), next_vb.to(tl.float32)
            if SILU:
                b_za, b_zb = next_za.to(tl.float32), next_zb.to(tl.float32)
            b_ba, b_bb = next_ba.to(tl.float32), next_bb.to(tl.float32)
            p_operands += H * HALVES
            p_numbers += H * FLOATS

    if SAVE_STATES and IS_VARLEN:
        spare = has_spare_slot(bos, bos + T_n, INTERVAL)
        store_state(p_s, tl.zeros_like(b_h), o_k, o_v, spare, K, V, True)
    if ends is not None:
        store_state(ends + (i_w * H + i_h) * (K * V), by_entries(-b_h), o_k, o_v, None, K, V, True)
    if ht is not None and not BY_INTERVAL:
        p_h = ht + i_w * s_h + i_h * (K * V)
        store_state(p_h, by_entries(-b_h), o_k, o_v, written if POOLED else None, K, V, STATE_V_FIRST)
