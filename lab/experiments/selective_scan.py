"""Mamba's selective scan compiled for a CPU (arXiv 2312.00752, section 3), so that transformers' Mamba trains there.

Each channel d has a state of N entries, with inputs x and steps dt of its own, and B and C of the token:

    h_t = exp(dt_t A_d) h_{t-1} + dt_t x_t B_t,        y_t = C_t^T h_t
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

# sequences at once: their decays stay in the cache
ROWS = 8
sums_in_any_order = njit(cache=True, fastmath={'reassoc', 'contract', 'nsz'})


@sums_in_any_order
def read(decay, u, b, c, y, states):
    """Outputs `y` `[R, T, D]` and the states `[T, D, N]` of the last row, from `u = dt x`."""
    R, T, D, N = decay.shape
    for r in range(R):
        for t in range(T):
            for d in range(D):
                total = u[r, t, d] * 0
                for n in range(N):
                    h = u[r, t, d] * b[r, t, n]
                    if t > 0:
                        h += decay[r, t, d, n] * states[t - 1, d, n]
                    states[t, d, n] = h
                    total += c[r, t, n] * h
                y[r, t, d] = total


@sums_in_any_order
def read_backward(decay, u, b, c, A, dt, y, grad, states, kept, d_u, d_b, d_c, d_A, d_dt):
    """Gradients, from that of `y`, added to `d_*`; `kept` `[D, N]` is what later tokens do to the state."""
    R, T, D, N = decay.shape
    for r in range(R):
        read(decay[r:r + 1], u[r:r + 1], b[r:r + 1], c[r:r + 1], y, states)
        kept[:] = 0
        for t in range(T - 1, -1, -1):
            for d in range(D):
                of_u, of_dt = u[r, t, d] * 0, u[r, t, d] * 0
                for n in range(N):
                    g = kept[d, n] + grad[r, t, d] * c[r, t, n]
                    d_c[r, t, n] += grad[r, t, d] * states[t, d, n]
                    d_b[r, t, n] += g * u[r, t, d]
                    of_u += g * b[r, t, n]
                    g *= decay[r, t, d, n]
                    kept[d, n] = g
                    if t > 0:
                        g *= states[t - 1, d, n]
                        of_dt += g * A[d, n]
                        d_A[d, n] += g * dt[r, t, d]
                d_u[r, t, d] += of_u
                d_dt[r, t, d] += of_dt


class Scan(torch.autograd.Function):
    """`u` and `dt` `[B, T, D]`, `A` `[D, N]`, `b` and `c` `[B, T, N]` to `y` `[B, T, D]`."""

    @staticmethod
    def forward(ctx, u: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor) -> Tensor:
        u, dt, A, b, c = (x.contiguous() for x in (u, dt, A, b, c))
        ctx.save_for_backward(u, dt, A, b, c)
        y, states = torch.empty_like(u), u.new_empty(*u.shape[1:], A.shape[1]).numpy()
        for rows, decay in decays(dt, A):
            read(decay, *(x[rows].numpy() for x in (u, b, c, y)), states)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        u, dt, A, b, c = ctx.saved_tensors
        d_u, d_dt, d_A, d_b, d_c = (torch.zeros_like(x) for x in (u, dt, A, b, c))
        y, states = torch.empty_like(u[:1]).numpy(), u.new_empty(*u.shape[1:], A.shape[1]).numpy()
        kept, grad = np.empty_like(A.numpy()), grad.contiguous()
        for rows, decay in decays(dt, A):
            read_backward(
                decay, *(x[rows].numpy() for x in (u, b, c)), A.numpy(), dt[rows].numpy(), y, grad[rows].numpy(), states, kept,
                *(x[rows].numpy() for x in (d_u, d_b, d_c)), d_A.numpy(), d_dt[rows].numpy(),
            )
        return d_u, d_dt, d_A, d_b, d_c


def decays(dt: Tensor, A: Tensor):
    """Slices of some rows, and `exp(dt A)` `[R, T, D, N]` of them, in one buffer."""
    buffer = dt.new_empty(ROWS, *dt.shape[1:], A.shape[1])
    for start in range(0, len(dt), ROWS):
        rows = slice(start, start + ROWS)
        decay = buffer[:len(dt[rows])]
        yield rows, torch.exp(torch.mul(dt[rows, ..., None], A, out=decay), out=decay).numpy()


def mamba_selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor,
    delta_softplus: bool, return_last_state: bool = False, **kwargs,
) -> Tensor:
    """In the place of transformers' function of that name: `hidden_states`, `dt`, `z` `[B, D, T]`, `B`, `C` `[B, N, T]`."""
    if return_last_state or not delta_softplus:
        raise NotImplementedError('Mamba compiled for a CPU takes delta_softplus, and no return_last_state')
    dt = F.softplus(dt + delta_bias[:, None])
    y = Scan.apply((dt * hidden_states).mT, dt.mT, A, B.mT, C.mT).mT
    return (y + hidden_states * D[:, None]) * F.silu(z)
