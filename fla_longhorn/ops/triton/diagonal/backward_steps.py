"""Steps of the diagonal update's backward kernel: four tokens forward, then back, with their states in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import divide
from fla_longhorn.ops.triton.diagonal.common import sigmoid, step_size, unstack, update, weighted_rows


@triton.jit
def sum_channels(m0, m1, w0, w1, PRECISE: tl.constexpr):
    """sum_v m_t[j, v] w_t[v] of two tokens `[BK, 2]`, mostly on the tensor cores: a product with a matrix of ones and zeros.

    A thread has one channel v and all j. The right operand has rows [j, v % 4] and columns [t, v / 4]: then its layout is the
    one that the values have, and none changes its thread. The product selects j and adds over v % 4, `tl.sum` over the rest.
    Operands are rounded to TF32, with PRECISE in two parts.
    """
    BK: tl.constexpr = m0.shape[0]
    BV: tl.constexpr = m0.shape[1]
    b_x = tl.permute(tl.reshape(tl.join(m0 * w0, m1 * w1), (BK, BV // 4, 4, 2)), (0, 2, 3, 1))
    b_x = tl.reshape(b_x, (4 * BK, BV // 2))
    b_own = (tl.arange(0, 4 * BK)[None, :] // 4 == tl.arange(0, BK)[:, None]).to(tl.float32)
    if PRECISE:
        b_high = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_s = tl.dot(b_own, b_high, tl.dot(b_own, b_x - b_high, input_precision='tf32'), input_precision='tf32')
    else:
        b_s = tl.dot(b_own, b_x, input_precision='tf32')
    return tl.sum(tl.reshape(b_s, (BK, 2, BV // 4)), 2)


@triton.jit
def side_by_side(x, BV: tl.constexpr):
    """Four `[1, BV]` as `[BV, 4]`."""
    return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (BV, 4))


@triton.jit
def load_four(p, n_u, m_v, S: tl.constexpr, OTHER: tl.constexpr, MASKED: tl.constexpr, GUARDED: tl.constexpr):
    """What lies at `p [1, BV]` and S elements further each, for four tokens; GUARDED: only the first n_u exist."""
    xs = ()
    for u in tl.static_range(4):
        if GUARDED:
            xs = xs + (tl.load(p + u * S, mask=m_v & (tl.full(m_v.shape, u, tl.int32) < n_u), other=OTHER),)
        elif MASKED:
            xs = xs + (tl.load(p + u * S, mask=m_v, other=OTHER),)
        else:
            xs = xs + (tl.load(p + u * S),)
    return xs


@triton.jit
def load_keys(p_r, p_k, n_u, R: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr):
    """Keys `[BK, 4]` of four tokens, the last of n_u where fewer exist, and a tuple of their |k|^2."""
    o_u = tl.minimum(tl.arange(0, 4), n_u - 1)[None, :]
    ns = ()
    for u in tl.static_range(4):
        ns = ns + (tl.load(p_r + tl.minimum(n_u - 1, u) * R + 2 * KP),)
    return tl.load(p_k + o_u * R + tl.arange(0, BK)[:, None]), ns


@triton.jit
def replay_block(b_h, b_keys, ns, vs, betas, SIGMOID: tl.constexpr):
    """The state four tokens later."""
    ks = unstack(b_keys)
    for u in tl.static_range(4):
        b_h = update(b_h, ks[u], step_size(betas[u].to(tl.float32), ns[u], SIGMOID), vs[u].to(tl.float32))
    return b_h


@triton.jit
def backward_token(b_G, b_h, b_a, b_k, b_q, b_v, b_dy, ROWS: tl.constexpr):
    """One token back: (G before it, m, g, sum_j k_j m_j) from the decayed G after it, the state before it and its decay."""
    b_G += b_q * b_dy
    b_m = b_G * (0.5 * b_v - b_k * b_h)
    return b_a * b_G, b_m, weighted_rows(b_k, b_G, ROWS), weighted_rows(b_k, b_m, ROWS)


@triton.jit
def finish_token(
    b_g, b_d, b_y, b_v, b_beta, b_eps, b_f, b_dy, b_D, b_do, b_z, m, p_dv, p_dbeta, p_dz,
    SIGMOID: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """Store one token's gradients of v, beta and z; return (eps^2 deps, dbeta), which are summed over the channels later."""
    b_deps = b_d + (0.5 * b_v) * b_g
    b_dv = b_eps * b_g
    b_db = b_f * (b_f * b_deps)
    b_w = b_eps * (b_eps * b_deps)
    if SIGMOID:
        b_db *= b_beta * (1. - b_beta)
    if HAS_D:
        b_dv += b_D * b_dy
        b_y += b_D * b_v
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask=m)
    if not SCALAR_BETA:
        tl.store(p_dbeta, b_db.to(p_dbeta.dtype.element_ty), mask=m)
    if HAS_Z:
        b_z = b_z.to(tl.float32)
        b_s = sigmoid(b_z)
        b_dz = b_do.to(tl.float32) * b_y * (b_s * (1. + b_z * (1. - b_s)))
        tl.store(p_dz, b_dz.to(p_dz.dtype.element_ty), mask=m)
    return b_w, b_db


@triton.jit
def finish_block(
    gs, ds, outputs, vs, betas, es, fs, dys, b_D, dos, zs, n_u, p_dv, p_dbeta, p_dz, p_w, m_v, H: tl.constexpr,
    V: tl.constexpr, S_B: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """:func:`finish_token` for four tokens, of which n_u exist; keeps what is summed over the channels later at `p_w`."""
    ws, dbs = (), ()
    for u in tl.static_range(4):
        b_w, b_db = finish_token(
            gs[u], ds[u], outputs[u], vs[u], betas[u], es[u], fs[u], dys[u], b_D, dos[u], zs[u],
            m_v & (tl.full(m_v.shape, u, tl.int32) < n_u), p_dv + u * H * V, p_dbeta + u * S_B, p_dz + u * H * V,
            SIGMOID, HAS_D, HAS_Z, SCALAR_BETA,
        )
        ws, dbs = ws + (b_w,), dbs + (b_db,)
    # [BV, 4]
    p_w += tl.arange(0, BV)[:, None] * C + tl.arange(0, 4)[None, :]
    tl.store(p_w, side_by_side(ws, BV))
    if SCALAR_BETA:
        tl.store(p_w + C * BV, side_by_side(dbs, BV))


@triton.jit
def backward_block(
    b_G, b_dD, b_D, b_h, vs, betas, dos, zs, i_k, n_u, p_r, p_dv, p_dbeta, p_dz, p_w, p_acc, p_part, m_v,
    H: tl.constexpr, V: tl.constexpr, S_B: tl.constexpr, R: tl.constexpr, PR: tl.constexpr, KP: tl.constexpr,
    NK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PRECISE: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """Four tokens forward from the state before them, with all states kept, and back; only the first n_u exist.

    The others have the last one's key, and no step size, value or gradient: they change nothing. Stores come last, because
    loads don't move up across them.
    """
    p_k = p_r + i_k * BK + tl.arange(0, BK)
    hs, fs, es, dys, ys, bs = (b_h,), (), (), (), (), ()
    for u in tl.static_range(4):
        o_r = tl.minimum(n_u - 1, u) * R
        b_v, b_beta, b_dy = vs[u].to(tl.float32), betas[u].to(tl.float32), dos[u].to(tl.float32)
        if HAS_Z:
            b_z = zs[u].to(tl.float32)
            b_dy *= b_z * sigmoid(b_z)
        if SIGMOID:
            b_beta = sigmoid(b_beta)
        b_f = divide(1., 1. + b_beta * tl.load(p_r + o_r + 2 * KP))
        b_eps = b_beta * b_f
        b_h = update(b_h, tl.load(p_k + o_r)[:, None], b_eps, b_v)
        hs, fs, es, dys, ys, bs = hs + (b_h,), fs + (b_f,), es + (b_eps,), dys + (b_dy,), ys + (b_v,), bs + (b_beta,)
        if HAS_D:
            if i_k == 0:
                b_dD += b_dy * b_v
    dqs = (sum_channels(hs[1], hs[2], dys[0], dys[1], PRECISE), sum_channels(hs[3], hs[4], dys[2], dys[3], PRECISE))
    dks = dqs

    gs, ds, outputs, b_last = dys, dys, dys, b_h
    for u in tl.static_range(3, -1, -1):
        o_r = tl.minimum(n_u - 1, u) * R
        b_k, b_q = tl.load(p_k + o_r)[:, None], tl.load(p_k + o_r + KP)[:, None]
        b_a = 1. - es[u] * tl.load(p_k + o_r + 2 * KP + 4)[:, None]
        b_y = weighted_rows(b_q, hs[u + 1], ROWS) if HAS_Z else b_D
        b_G, b_m, b_g, b_d = backward_token(b_G, hs[u], b_a, b_k, b_q, ys[u], dys[u], ROWS)
        if NK > 1:
            m_a = tl.full(m_v.shape, 0, tl.int32) < i_k
            b_g += tl.load(p_acc + u * BV, mask=m_a, other=0.)
            b_d += tl.load(p_acc + u * BV + C * BV, mask=m_a, other=0.)
            if HAS_Z:
                b_y += tl.load(p_acc + u * BV + 2 * C * BV, mask=m_a, other=0.)
        gs, ds, outputs = gs[:u] + (b_g,) + gs[u + 1:], ds[:u] + (b_d,) + ds[u + 1:], outputs[:u] + (b_y,) + outputs[u + 1:]
        if u % 2 == 0:
            b_dk = sum_channels(b_m, b_last, es[u], es[u + 1], PRECISE)
            dks = (b_dk, dks[1]) if u == 0 else (dks[0], b_dk)
        b_last = b_m

    for u in tl.static_range(2):
        o_u = 2 * u + tl.arange(0, 2)[None, :]
        p_row = p_part + i_k * BK + tl.arange(0, BK)[:, None] + o_u * PR
        tl.store(p_row, dqs[u], mask=o_u < n_u)
        tl.store(p_row + KP, dks[u], mask=o_u < n_u)
    if NK == 1:
        finish_block(
            gs, ds, outputs, ys, bs, es, fs, dys, b_D, dos, zs, n_u, p_dv, p_dbeta, p_dz, p_w, m_v, H, V, S_B, BV, C,
            SIGMOID, HAS_D, HAS_Z, SCALAR_BETA,
        )
    elif i_k + 1 < NK:
        for u in tl.static_range(4):
            tl.store(p_acc + u * BV, gs[u])
            tl.store(p_acc + u * BV + C * BV, ds[u])
            if HAS_Z:
                tl.store(p_acc + u * BV + 2 * C * BV, outputs[u])
    else:
        finish_block(
            gs, ds, outputs, ys, bs, es, fs, dys, b_D, dos, zs, n_u, p_dv, p_dbeta, p_dz, p_w, m_v, H, V, S_B, BV, C,
            SIGMOID, HAS_D, HAS_Z, SCALAR_BETA,
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
