"""Steps of the diagonal update's backward kernel: four tokens forward, then back, with their states in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import decays, sigmoid, step_factors, step_sizes, weighted_rows
from fla_longhorn.ops.triton.diagonal.common import unstack, update


@triton.jit
def sum_channels(b_x, SUMS: tl.constexpr):
    """Sums of b_x `[BK, BV]` over v % 4, `[BK, BV / 4]`, on the tensor cores: a product with a matrix of ones and zeros.

    A thread has one channel v and all j. The right operand has rows [j, v % 4] and columns v / 4: then its layout is the one
    that the values have, and none changes its thread. The product selects j and adds over v % 4.
    SUMS says how operands are rounded: `tf32`, `split` into two parts in TF32, or `ieee`, unrounded.
    """
    BK: tl.constexpr = b_x.shape[0]
    BV: tl.constexpr = b_x.shape[1]
    b_x = tl.reshape(tl.permute(tl.reshape(b_x, (BK, BV // 4, 4)), (0, 2, 1)), (4 * BK, BV // 4))
    b_own = (tl.arange(0, 4 * BK)[None, :] // 4 == tl.arange(0, BK)[:, None]).to(tl.float32)
    if SUMS == 'split':
        b_high = upper_half(b_x)
        return tl.dot(b_own, b_high, tl.dot(b_own, b_x - b_high, input_precision='tf32'), input_precision='tf32')
    else:
        return tl.dot(b_own, b_x, input_precision=SUMS)


@triton.jit
def add_sums(b_s, b_x0, b_x1, PAIR: tl.constexpr, SUMS: tl.constexpr):
    """Add up :func:`sum_channels` of two tokens over the rest of the channels, on the tensor cores.

    b_s is `[v / 4 % 2, j % (BK / 2); t, j / (BK / 2)]` of four tokens, in whose layout again no value changes its thread.
    """
    BK: tl.constexpr = b_x0.shape[0]
    BN: tl.constexpr = b_x0.shape[1]
    b_x = tl.permute(tl.reshape(tl.join(b_x0, b_x1), (2, BK // 2, BN // 2, 2, 2)), (3, 1, 4, 0, 2))
    b_x = tl.reshape(b_x, (BK, 2 * BN))
    b_own = (tl.arange(0, 2 * BN)[:, None] // (BN // 2) + 4 * PAIR == tl.arange(0, 8)[None, :]).to(tl.float32)
    if SUMS == 'split':
        b_high = upper_half(b_x)
        b_s = tl.dot(b_x - b_high, b_own, b_s, input_precision='tf32')
        return tl.dot(b_high, b_own, b_s, input_precision='tf32')
    else:
        return tl.dot(b_x, b_own, b_s, input_precision=SUMS)


@triton.jit
def upper_half(b_x):
    """What TF32 keeps."""
    return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def tokens_of(b_s):
    """[t, j] of four tokens from the sums `[v / 4 % 2, j; t, half of j]`."""
    BK: tl.constexpr = b_s.shape[0]
    b_s = tl.sum(tl.reshape(b_s, (2, BK // 2, 4, 2)), 0)
    return tl.reshape(tl.permute(b_s, (1, 2, 0)), (4, BK))


@triton.jit
def side_by_side(x, BV: tl.constexpr):
    """Four `[1, BV]` as `[BV, 4]`."""
    return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (BV, 4))


@triton.jit
def apart(x):
    """The inverse of :func:`side_by_side`."""
    a, b = tl.split(tl.reshape(x, (1, x.shape[0], 2, 2)))
    x0, x2 = tl.split(a)
    x1, x3 = tl.split(b)
    return x0, x1, x2, x3


@triton.jit
def load_four(p, n_u, m_v, S: tl.constexpr, OTHER: tl.constexpr):
    """Words at `p [1, BV]` of four tokens S elements apart, of which the first n_u exist."""
    xs = ()
    for u in tl.static_range(4):
        xs = xs + (to_word(tl.load(p + u * S, mask=m_v & (tl.full(m_v.shape, u, tl.int32) < n_u), other=OTHER)),)
    return xs


@triton.jit
def load_next(p, m, S: tl.constexpr, OTHER: tl.constexpr):
    """:func:`load_four` with one mask for the four, or None."""
    xs = ()
    for u in tl.static_range(4):
        if m is None:
            xs = xs + (to_word(tl.load(p + u * S)),)
        else:
            xs = xs + (to_word(tl.load(p + u * S, mask=m, other=OTHER)),)
    return xs


@triton.jit
def to_word(b_x):
    """A loaded value in a 32-bit register, unconverted: a loop would copy 16-bit values between registers."""
    if b_x.dtype.primitive_bitwidth == 16:
        return b_x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        return b_x


@triton.jit
def from_word(b_x, DTYPE: tl.constexpr):
    """Float32 of what was loaded as DTYPE."""
    if tl.bfloat16 == DTYPE:
        return (b_x << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        return b_x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return b_x.to(tl.float32)


@triton.jit
def load_keys(p_r, p_k, n_u, R: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr):
    """Keys `[BK, 4]` of four tokens, the last of n_u where fewer exist, and a tuple of their |k|^2."""
    o_u = tl.minimum(tl.arange(0, 4), n_u - 1)[None, :]
    ns = ()
    for u in tl.static_range(4):
        ns = ns + (tl.load(p_r + tl.minimum(n_u - 1, u) * R + 2 * KP),)
    return tl.load(p_k + o_u * R + tl.arange(0, BK)[:, None]), ns


@triton.jit
def copy_rows(p_to, p_r, n_u, R: tl.constexpr, KP: tl.constexpr):
    """Copy the rows of n_u tokens, and the last one again until there are four."""
    o_r = tl.arange(0, 4 * KP)
    for u in range(0, 4):
        # key, query and |k|^2: the elements between them and the squares are uninitialised
        b_row = tl.load(p_r + tl.minimum(u, n_u - 1) * R + o_r, mask=o_r <= 2 * KP)
        tl.store(p_to + u * R + o_r, b_row, mask=o_r <= 2 * KP)


@triton.jit
def replay_block(
    b_h, b_keys, ns, vs, betas, gs, V_TYPE: tl.constexpr, BETA_TYPE: tl.constexpr, G_TYPE: tl.constexpr,
    OPTIONS: tl.constexpr, HAS_G: tl.constexpr,
):
    """The state four tokens later."""
    ks = unstack(b_keys)
    for u in tl.static_range(4):
        b_eps = step_sizes(from_word(betas[u], BETA_TYPE), ns[u], OPTIONS)
        if HAS_G:
            b_h *= decays(from_word(gs[u], G_TYPE))
        b_h = update(b_h, ks[u], b_eps, from_word(vs[u], V_TYPE))
    return b_h


@triton.jit
def scaled_error(b_h, b_k, b_s, b_v):
    """s (v - k S)"""
    return tl.fma(-(b_k * b_s), b_h, b_s * b_v)


@triton.jit
def forward_token(b_h, b_k, b_q, b_s, b_r, b_v, ROWS: tl.constexpr):
    """The state S' after one token, x = s (v - k S) and q^T S'."""
    b_x = scaled_error(b_h, b_k, b_s, b_v)
    b_h += (b_k * b_r) * b_x
    return b_h, b_x, weighted_rows(b_q, b_h, ROWS)


@triton.jit
def backward_token(b_G, b_x, b_a, b_k, b_q, b_sv, b_dy, ROWS: tl.constexpr):
    """One token back: (G before it, s m, du, sum_j k_j s m_j) from the decayed G after it, its x, its decay and s v."""
    b_G += b_q * b_dy
    b_m = b_G * (b_x - 0.5 * b_sv)
    return b_a * b_G, b_m, weighted_rows(b_k, b_G, ROWS), weighted_rows(b_k, b_m, ROWS)


@triton.jit
def gate_and_slope(b_z):
    """silu(z) and its derivative."""
    b_s = sigmoid(b_z)
    b_gate = b_z * b_s
    return b_gate, b_s + b_gate * (1. - b_s)


@triton.jit
def finish_token(
    b_du, b_d, b_y, b_dg, b_sv, b_s, b_r, b_slope, b_dy, b_D, m, p_dv, p_dbeta, p_dz, p_dg,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """Store one token's gradients of v, beta, z and g; return (eps^2 deps, dbeta), which are summed over channels later."""
    b_eps = b_s * b_r
    b_d += (0.5 * b_sv) * b_du
    b_dv = b_eps * b_du
    b_db = b_slope * b_d
    if HAS_D:
        b_dv += b_D * b_dy
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask=m)
    if not SCALAR_BETA:
        tl.store(p_dbeta, b_db.to(p_dbeta.dtype.element_ty), mask=m)
    if HAS_Z:
        tl.store(p_dz, b_y.to(p_dz.dtype.element_ty), mask=m)
    if HAS_G:
        tl.store(p_dg, b_dg.to(p_dg.dtype.element_ty), mask=m)
    return (b_eps * b_r) * b_d, b_db


@triton.jit
def finish_block(
    dus, ds, outputs, dgs, svs, ss, rs, slopes, dys, b_D, n_u, p_dv, p_dbeta, p_dz, p_dg, p_w, m_v, H: tl.constexpr,
    V: tl.constexpr, S_B: tl.constexpr, BV: tl.constexpr, INTERVAL: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_G: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """:func:`finish_token` for four tokens, of which n_u exist; stores what is summed over the channels later at `p_w`."""
    ws, dbs = (), ()
    for u in tl.static_range(4):
        b_w, b_db = finish_token(
            dus[u], ds[u], outputs[u], dgs[u], svs[u], ss[u], rs[u], slopes[u], dys[u], b_D,
            m_v & (tl.full(m_v.shape, u, tl.int32) < n_u), p_dv + u * H * V, p_dbeta + u * S_B, p_dz + u * H * V,
            p_dg + u * H * V, HAS_D, HAS_Z, HAS_G, SCALAR_BETA,
        )
        ws, dbs = ws + (b_w,), dbs + (b_db,)
    tl.store(p_w, side_by_side(ws, BV))
    if SCALAR_BETA:
        tl.store(p_w + INTERVAL * BV, side_by_side(dbs, BV))


@triton.jit
def backward_block(
    b_G, b_dD, b_D, b_h, vs, betas, dos, zs, gs, i_k, n_u, p_r, p_dv, p_dbeta, p_dz, p_dg, p_w, p_part, m_v,
    V_TYPE: tl.constexpr, BETA_TYPE: tl.constexpr, DO_TYPE: tl.constexpr, Z_TYPE: tl.constexpr, G_TYPE: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, S_B: tl.constexpr, R: tl.constexpr, PR: tl.constexpr, KP: tl.constexpr,
    NK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, INTERVAL: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
    OPTIONS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_G: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """Four tokens forward from the state before them, with each one's x kept, and back; only the first n_u exist.

    With a gate, P is kept in place of x, which takes fewer registers than both. The other tokens have the last one's key and a
    step size, value, gradient and g of zero: they change nothing. Stores come last, because the compiler moves no load above
    them. Between two blocks of K, the sums over K are in scratch.
    """
    p_k = p_r + i_k * BK + tl.arange(0, BK)
    b_dq, b_dk = tl.zeros([BK, 8], dtype=tl.float32), tl.zeros([BK, 8], dtype=tl.float32)
    # [BV, 4]
    o_w = tl.arange(0, BV)[:, None] * INTERVAL + tl.arange(0, 4)[None, :]
    if NK > 1:
        # sums over the entries of K before these
        p_acc = p_w + (2 if SCALAR_BETA else 1) * INTERVAL * BV + o_w
        m_a = tl.zeros_like(o_w) < i_k
        earlier_dus = apart(tl.load(p_acc, mask=m_a, other=0.))
        earlier_ds = apart(tl.load(p_acc + INTERVAL * BV, mask=m_a, other=0.))
        if HAS_Z:
            earlier_outputs = apart(tl.load(p_acc + 2 * INTERVAL * BV, mask=m_a, other=0.))
        if HAS_G:
            earlier_dgs = apart(tl.load(p_acc + 3 * INTERVAL * BV, mask=m_a, other=0.))
    es = ()
    xs, ss, rs, slopes, dys, svs, outputs, b_last = (), (), (), (), (), (), (), b_dq
    for u in tl.static_range(4):
        b_v, b_dy = from_word(vs[u], V_TYPE), from_word(dos[u], DO_TYPE)
        if HAS_Z:
            b_gate, b_slope = gate_and_slope(from_word(zs[u], Z_TYPE))
            b_dy, b_do = b_dy * b_gate, b_dy * b_slope
        b_s, b_r, b_slope = step_factors(from_word(betas[u], BETA_TYPE), tl.load(p_r + u * R + 2 * KP), OPTIONS)
        if HAS_G:
            b_e = decays(from_word(gs[u], G_TYPE))
            b_h *= b_e
            b_P, es = b_h, es + (b_e,)
        b_h, b_x, b_y = forward_token(
            b_h, tl.load(p_k + u * R)[:, None], tl.load(p_k + u * R + KP)[:, None], b_s, b_r, b_v, ROWS,
        )
        if HAS_D:
            b_dD += tl.where(i_k == 0, b_dy * b_v, 0.)
        b_sum = sum_channels(b_h * b_dy, SUMS)
        if u % 2 == 1:
            b_dq = add_sums(b_dq, b_last, b_sum, u // 2, SUMS)
        b_last = b_sum
        if HAS_Z:
            if NK > 1:
                b_y += earlier_outputs[u]
            b_dz = (b_y + b_D * b_v if HAS_D else b_y) * b_do
            b_y = tl.where(i_k + 1 < NK, b_y, b_dz)
        xs, ss, rs, slopes = xs + (b_P if HAS_G else b_x,), ss + (b_s,), rs + (b_r,), slopes + (b_slope,)
        dys, svs, outputs = dys + (b_dy,), svs + (b_s * b_v,), outputs + (b_y,)

    dus, ds, dgs = dys, dys, dys
    for u in tl.static_range(3, -1, -1):
        # '.ca' is the default; it only stops the compiler from merging this with the earlier load: 128 registers
        b_k, b_q = tl.load(p_k + u * R, cache_modifier='.ca'), tl.load(p_k + u * R + KP, cache_modifier='.ca')
        b_k, b_q = b_k[:, None], b_q[:, None]
        b_a = tl.fma(-(b_k * (ss[u] * rs[u])), b_k, 1.)
        b_x = scaled_error(xs[u], b_k, ss[u], from_word(vs[u], V_TYPE)) if HAS_G else xs[u]
        b_G, b_m, b_du, b_d = backward_token(b_G, b_x, b_a, b_k, b_q, svs[u], dys[u], ROWS)
        if HAS_G:
            b_dg = weighted_rows(b_G, xs[u], ROWS)
            b_G *= es[u]
            if NK > 1:
                b_dg += earlier_dgs[u]
            dgs = dgs[:u] + (b_dg,) + dgs[u + 1:]
        if NK > 1:
            b_du, b_d = b_du + earlier_dus[u], b_d + earlier_ds[u]
        dus, ds = dus[:u] + (b_du,) + dus[u + 1:], ds[:u] + (b_d,) + ds[u + 1:]
        b_sum = sum_channels(b_m * rs[u], SUMS)
        if u % 2 == 0:
            b_dk = add_sums(b_dk, b_sum, b_last, u // 2, SUMS)
        b_last = b_sum

    o_u = tl.arange(0, 4)[:, None]
    p_row = p_part + i_k * BK + tl.arange(0, BK)[None, :] + o_u * PR
    tl.store(p_row, tokens_of(b_dq), mask=o_u < n_u)
    tl.store(p_row + KP, tokens_of(b_dk), mask=o_u < n_u)
    if NK > 1 and i_k + 1 < NK:
        tl.store(p_acc, side_by_side(dus, BV))
        tl.store(p_acc + INTERVAL * BV, side_by_side(ds, BV))
        if HAS_Z:
            tl.store(p_acc + 2 * INTERVAL * BV, side_by_side(outputs, BV))
        if HAS_G:
            tl.store(p_acc + 3 * INTERVAL * BV, side_by_side(dgs, BV))
    else:
        finish_block(
            dus, ds, outputs, dgs, svs, ss, rs, slopes, dys, b_D, n_u, p_dv, p_dbeta, p_dz, p_dg, p_w + o_w, m_v, H, V, S_B,
            BV, INTERVAL, HAS_D, HAS_Z, HAS_G, SCALAR_BETA,
        )
    return b_G, b_dD


@triton.jit
def ring_offsets(BK: tl.constexpr, BV: tl.constexpr):
    """Offsets `[BK / 4, BV, 4]` of a state tile in scratch: four entries of a channel are adjacent, for wide accesses."""
    o_r, o_v, o_4 = tl.arange(0, BK // 4), tl.arange(0, BV), tl.arange(0, 4)
    return o_r[:, None, None] * (4 * BV) + o_v[None, :, None] * 4 + o_4[None, None, :]


@triton.jit
def to_ring(b_h):
    BK: tl.constexpr = b_h.shape[0]
    BV: tl.constexpr = b_h.shape[1]
    return tl.permute(tl.reshape(b_h, (BK // 4, 4, BV)), (0, 2, 1))


@triton.jit
def from_ring(b_x):
    BK: tl.constexpr = 4 * b_x.shape[0]
    BV: tl.constexpr = b_x.shape[1]
    return tl.reshape(tl.permute(b_x, (0, 2, 1)), (BK, BV))
