"""Steps of the diagonal update's backward kernel: four tokens forward, then back, with their states in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fla_longhorn.ops.triton.common import divide
from fla_longhorn.ops.triton.diagonal.common import load_masked, sigmoid, step_size, update, weighted_rows


@triton.jit
def stack4(a, b, c, d):
    """Four `[R, BV]` as `[4, R, BV]`."""
    x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(x, (2, 3, 0, 1)), (4, a.shape[0], a.shape[1]))


@triton.jit
def sum_channels(m, w, PRECISE: tl.constexpr):
    """sum_v m_t[j, v] w_t[v] of four tokens `[BK, 4]`, mostly on the tensor cores: a product with a matrix of ones and zeros.

    The layouts of sums and operand agree, so that no value changes its thread: four threads side by side hold one column of
    the right operand, which has rows [j / 4, v % 4, j % 4] and columns [t, v / 4]. The product selects j and adds over v % 4,
    `tl.sum` over the rest. Operands are rounded to TF32, with PRECISE in two parts.
    """
    BK: tl.constexpr = m[0].shape[0]
    BV: tl.constexpr = m[0].shape[1]
    b_x = tl.reshape(stack4(m[0] * w[0], m[1] * w[1], m[2] * w[2], m[3] * w[3]), (4, BK // 4, 4, BV // 4, 4))
    b_x = tl.reshape(tl.permute(b_x, (1, 4, 2, 0, 3)), (4 * BK, BV))
    o_x = tl.arange(0, 4 * BK)[None, :]
    b_own = (o_x // 16 * 4 + o_x % 4 == tl.arange(0, BK)[:, None]).to(tl.float32)
    if PRECISE:
        b_high = (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        b_s = tl.dot(b_own, b_high, tl.dot(b_own, b_x - b_high, input_precision='tf32'), input_precision='tf32')
    else:
        b_s = tl.dot(b_own, b_x, input_precision='tf32')
    return tl.sum(tl.reshape(b_s, (BK, 4, BV // 4)), 2)


@triton.jit
def side_by_side(x, BV: tl.constexpr):
    """Four `[1, BV]` as `[BV, 4]`."""
    return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (BV, 4))


@triton.jit
def load_token(
    p_n, p_v, p_beta, p_do, p_z, m_t, m,
    MASKED: tl.constexpr, SIGMOID: tl.constexpr, HAS_Z: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """(v, beta, f, dy) of a token, each `[1, BV]`; all but f are zero where masked, so a masked token changes nothing."""
    b_v = load_masked(p_v, m, MASKED)
    b_dy = load_masked(p_do, m, MASKED)
    if HAS_Z:
        b_z = load_masked(p_z, m, MASKED)
        b_dy *= b_z * sigmoid(b_z)
    if SCALAR_BETA:
        b_beta = load_masked(p_beta, m_t, MASKED) + tl.zeros_like(b_v)
    else:
        b_beta = load_masked(p_beta, m, MASKED)
    if SIGMOID:
        b_beta = sigmoid(b_beta)
        if MASKED:
            b_beta = tl.where(m, b_beta, 0.)
    b_f = divide(1., 1. + b_beta * load_masked(p_n, m_t, MASKED))
    return b_v, b_beta, b_f, b_dy


@triton.jit
def backward_token(b_G, b_h, b_a, b_k, b_q, b_v, b_dy, ROWS: tl.constexpr):
    """One token back: (G before it, m, g, sum_j k_j m_j) from the decayed G after it, the state before it and its decay."""
    b_G += b_q * b_dy
    b_m = b_G * (0.5 * b_v - b_k * b_h)
    return b_a * b_G, b_m, weighted_rows(b_k, b_G, ROWS), weighted_rows(b_k, b_m, ROWS)


@triton.jit
def finish_token(
    b_g, b_d, b_y, b_v, b_beta, b_eps, b_f, b_dy, b_D, m, p_do, p_z, p_dv, p_dbeta, p_dz,
    MASKED: tl.constexpr, SIGMOID: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, SCALAR_BETA: tl.constexpr,
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
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask=m if MASKED else None)
    if not SCALAR_BETA:
        tl.store(p_dbeta, b_db.to(p_dbeta.dtype.element_ty), mask=m if MASKED else None)
    if HAS_Z:
        b_do, b_z = load_masked(p_do, m, MASKED), load_masked(p_z, m, MASKED)
        b_s = sigmoid(b_z)
        b_dz = b_do * b_y * (b_s * (1. + b_z * (1. - b_s)))
        tl.store(p_dz, b_dz.to(p_dz.dtype.element_ty), mask=m if MASKED else None)
    return b_w, b_db


@triton.jit
def replay_block(
    b_h, p_r, p_k, p_v, p_beta, m_v, S_V: tl.constexpr, S_B: tl.constexpr, R: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, MASKED: tl.constexpr, SIGMOID: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """The state four tokens later."""
    o_k = tl.arange(0, BK)
    for u in tl.static_range(4):
        b_k = tl.load(p_k + u * R + o_k)[:, None]
        b_v = load_masked(p_v + u * S_V, m_v, MASKED)
        if SCALAR_BETA:
            b_beta = tl.load(p_beta + u * S_B).to(tl.float32) + tl.zeros_like(b_v)
        else:
            b_beta = load_masked(p_beta + u * S_B, m_v, MASKED)
        b_h = update(b_h, b_k, step_size(b_beta, tl.load(p_r + u * R + 2 * KP), SIGMOID), b_v)
    return b_h


@triton.jit
def backward_block(
    b_G, b_dD, b_D, b_h, i_k, n_u, p_r, p_v, p_beta, p_do, p_z, p_dv, p_dbeta, p_dz, p_w, p_acc, p_part, m_v,
    H: tl.constexpr, V: tl.constexpr, S_V: tl.constexpr, S_Z: tl.constexpr, S_DO: tl.constexpr, S_B: tl.constexpr,
    R: tl.constexpr, PR: tl.constexpr, KP: tl.constexpr, NK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, ROWS: tl.constexpr, KEEP_DECAY: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, SCALAR_BETA: tl.constexpr,
):
    """Four tokens forward from the state before them, with all states kept, and back; with TAIL only the first n_u exist."""
    o_k, o_u = tl.arange(0, BK), tl.arange(0, 4)
    p_k = p_r + i_k * BK
    M: tl.constexpr = MASKED or TAIL
    hs, decays, vs, betas, fs, dys, es = (b_h,), (), (), (), (), (), ()
    for u in tl.static_range(4):
        m = m_v & (tl.full(m_v.shape, u, tl.int32) < n_u)
        m_k = tl.full([BK], u, tl.int32) < n_u
        b_v, b_beta, b_f, b_dy = load_token(
            p_r + u * R + 2 * KP, p_v + u * S_V, p_beta + u * S_B, p_do + u * S_DO, p_z + u * S_Z, n_u > u, m,
            M, SIGMOID, HAS_Z, SCALAR_BETA,
        )
        b_eps = b_beta * b_f
        b_k = load_masked(p_k + u * R + o_k, m_k, TAIL)[:, None]
        if KEEP_DECAY:
            b_a = 1. - b_eps * load_masked(p_k + u * R + 2 * KP + 4 + o_k, m_k, TAIL)[:, None]
            b_h = b_a * b_h + b_k * (b_eps * b_v)
        else:
            b_a = b_eps
            b_h = update(b_h, b_k, b_eps, b_v)
        hs, decays, vs, betas = hs + (b_h,), decays + (b_a,), vs + (b_v,), betas + (b_beta,)
        fs, dys, es = fs + (b_f,), dys + (b_dy,), es + (b_eps,)
    p_row = p_part + i_k * BK
    m_u = (o_u < n_u)[:, None] & (o_k < BK)[None, :]
    tl.store(p_row, tl.trans(sum_channels((hs[1], hs[2], hs[3], hs[4]), dys, False)), mask=m_u if TAIL else None)

    ms, ws, dbs = (hs[0], hs[1], hs[2], hs[3]), vs, vs
    for u in tl.static_range(3, -1, -1):
        m = m_v & (tl.full(m_v.shape, u, tl.int32) < n_u)
        m_k = tl.full([BK], u, tl.int32) < n_u
        b_q = load_masked(p_k + u * R + KP + o_k, m_k, TAIL)[:, None]
        b_k = load_masked(p_k + u * R + o_k, m_k, TAIL)[:, None]
        if KEEP_DECAY:
            b_a = decays[u]
        else:
            b_a = 1. - es[u] * load_masked(p_k + u * R + 2 * KP + 4 + o_k, m_k, TAIL)[:, None]
        b_y = weighted_rows(b_q, hs[u + 1], ROWS) if HAS_Z else b_D
        b_G, b_m, b_g, b_d = backward_token(b_G, hs[u], b_a, b_k, b_q, vs[u], dys[u], ROWS)
        ms = ms[:u] + (b_m,) + ms[u + 1:]
        if HAS_D:
            if i_k == 0:
                b_dD += dys[u] * vs[u]
        if NK == 1:
            b_w, b_db = finish_token(
                b_g, b_d, b_y, vs[u], betas[u], es[u], fs[u], dys[u], b_D, m, p_do + u * S_DO, p_z + u * S_Z, p_dv + u * H * V,
                p_dbeta + u * S_B, p_dz + u * H * V, M, SIGMOID, HAS_D, HAS_Z, SCALAR_BETA,
            )
            ws, dbs = ws[:u] + (b_w,) + ws[u + 1:], dbs[:u] + (b_db,) + dbs[u + 1:]
        else:
            p_a = p_acc + u * BV
            if i_k > 0:
                b_g += tl.load(p_a)
                b_d += tl.load(p_a + C * BV)
                if HAS_Z:
                    b_y += tl.load(p_a + 2 * C * BV)
            tl.store(p_a, b_g)
            tl.store(p_a + C * BV, b_d)
            if HAS_Z:
                tl.store(p_a + 2 * C * BV, b_y)
    tl.store(p_row + KP, tl.trans(sum_channels(ms, es, False)), mask=m_u if TAIL else None)
    if NK == 1:
        # [BV, 4]
        p_w += tl.arange(0, BV)[:, None] * C + o_u[None, :]
        tl.store(p_w, side_by_side(ws, BV))
        if SCALAR_BETA:
            tl.store(p_w + C * BV, side_by_side(dbs, BV))
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
