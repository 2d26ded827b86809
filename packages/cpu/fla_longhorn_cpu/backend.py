"""Both updates on the CPU, compiled by Numba on the first call (seconds; the machine code is cached on disk).

This file passes tensors in the order and layout of the loops (:mod:`fla_longhorn_cpu.forward`) and chooses the number of
threads. float32 tensors are passed without a copy, and so are v, z, beta and the output if all are bfloat16; others are
converted, g always to float32. Results are bit-equal for any number of threads, with or without conversion.
"""

from __future__ import annotations

from typing import Any

import torch

from fla_kit.numba.arguments import FLOAT32, address, stored
from fla_kit.numba.launch import boundaries, launch
from fla_kit.numba.memory import BITS
from fla_kit.numba.simd import W as LANES
from fla_longhorn.ops.arguments import Arguments, Gradients
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn_cpu import backward, forward, places
from fla_longhorn_cpu.forward import block_size
from fla_longhorn_cpu.wide import W

# bytes of the states of a strip in backward (L2 cache)
L2_BYTES = 2**18

# whatever the caller's default dtype and device are
NEW: Any = dict(dtype=torch.float32, device='cpu')


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: torch.Tensor | None = None, pool: Pool | None = None,
):
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`.

    Blocks of channels run in parallel; `parallel` has no effect. A given `final_state` is written and returned; it may be
    `initial_state`, because each block reads its initial state before it writes its final one. The loops update the rows of a
    pool in place, or with `state_v_first` copies of them.
    """
    B, T, H, K, V = args.sizes
    N, state_v_first, is_varlen = args.num_sequences, args.state_v_first, args.cu_seqlens is not None
    if pool is not None and state_v_first:
        o, last, states = longhorn_fwd(args._replace(initial_state=pool.gather(N)), save_states=save_states, parallel=parallel)
        pool.scatter(last)
        return pool.without_absent(o, args.cu_seqlens), last, states
    C = checkpoint_interval(K) if save_states else T
    given, output_final_state = final_state, args.output_final_state or final_state is not None
    if given is None or state_v_first:
        final_state = torch.empty((N, H, K, V) if output_final_state and pool is None else 0, **NEW)
    if pool is None:
        where = places.in_order(N, H * K * V, args.initial_state is not None, output_final_state)
        initial_state = dense(k_first(args.initial_state, state_v_first))
        h0 = address('initial_state', initial_state, (N, H, K, V), FLOAT32, optional=True)
        ht = address('final_state', final_state, (N, H, K, V) if output_final_state else (0,), FLOAT32)
    else:
        where, P, stride = places.in_pool(pool, N), len(pool.states), pool.states.stride(0)
        h0 = ht = address('state', pool.states, (P, H, K, V), FLOAT32, stride=stride)
    dtype = common_dtype(args.v, args.beta, args.z)
    q, k, g, D = dense(scaled(args.q, args.scale)), dense(args.k), dense(args.g), dense(args.D)
    v, beta, (z, z_stride) = dense(args.v, dtype), dense(args.beta, dtype), rows_of(args.z, args.v.shape, dtype)
    # the loops skip sequences without a row
    o = (torch.empty if len(where) == N else torch.zeros)(args.v.shape, dtype=dtype, device='cpu')
    # packed sequences leave some slots unwritten; they hold zeros
    new, NS = torch.zeros if is_varlen else torch.empty, num_checkpoints(B, T, N, C, is_varlen) if save_states else 0
    states = new((NS, H, K, V) if save_states else 0, **NEW)
    BV, per_head = block_size(K, T), args.beta.dim() == 3
    launch(
        forward.forward, B * T * H * K * V, len(where) * H * -(-V // BV),
        address('q', q, (B, T, H, K), FLOAT32),
        address('k', k, (B, T, H, K), FLOAT32),
        address('v', v, (B, T, H, V)),
        address('beta', beta, (B, T, H) if per_head else (B, T, H, V)),
        gate_of(g, B, T, H, V),
        h0,
        address('D', D, (H, V), FLOAT32, optional=True),
        address('z', z, (B * T, H * V), stride=z_stride, optional=True), z_stride,
        boundaries(B, T, args.cu_seqlens), where,
        address('o', o, (B, T, H, V)),
        ht,
        address('states', states, (NS, H, K, V) if save_states else (0,), FLOAT32), NS,
        H, K, V, C, BV, args.exact, per_head, tuple(args.step_options), is_varlen, BITS[dtype],
    )
    if final_state is not None and output_final_state and state_v_first:
        final_state = final_state.transpose(-1, -2)
        final_state = final_state.contiguous() if given is None else given.copy_(final_state)
    return o.to(args.v.dtype), final_state, states


def longhorn_bwd(do, dht, states, args: Arguments, *, parallel: bool) -> Gradients:
    """Return the gradients.

    A block of `BG` channels writes its part of dq and dk, `KP` wide, which are added here. With `BG >= 2 * KP` channels in a
    block, the parts take no more memory than v.
    """
    B, T, H, K, V = args.sizes
    N, C, state_v_first = args.num_sequences, checkpoint_interval(K), args.state_v_first
    per_head, is_varlen = args.beta.dim() == 3, args.cu_seqlens is not None
    KP = -(-K // LANES) * LANES
    BG = min(-(-max(2 * KP, 128) // W), -(-V // W)) * W
    NG = -(-V // BG)
    NT = min(C, T)
    BT = min(NT, max(L2_BYTES // (4 * K * W), 16))
    dtype = common_dtype(do, args.v, args.beta, args.z)
    q, k, g, D = dense(scaled(args.q, args.scale)), dense(args.k), dense(args.g), dense(args.D)
    v, beta, (z, z_stride) = dense(args.v, dtype), dense(args.beta, dtype), rows_of(args.z, args.v.shape, dtype)
    do, dht, NS = dense(do, dtype), dense(k_first(dht, state_v_first)), num_checkpoints(B, T, N, C, is_varlen)
    # a head's gradients have a float32 part per block
    of_head, of_channel = (NG, B, T, H), (B, T, H, V)
    dbeta_dtype = torch.float32 if per_head else dtype
    dqk = torch.empty(NG, B, T, H, 2, KP, **NEW)
    dv = torch.empty(of_channel, dtype=dtype, device='cpu')
    dz = None if z is None else torch.empty(of_channel, dtype=dtype, device='cpu')
    dbeta = torch.empty(of_head if per_head else of_channel, dtype=dbeta_dtype, device='cpu')
    dg = None if g is None else torch.empty(of_head if g.dim() == 3 else of_channel, **NEW)
    dh0 = None if args.initial_state is None else torch.empty(N, H, K, V, **NEW)
    dD = None if D is None else torch.zeros(N, H, V, **NEW)
    launch(
        backward.backward, B * T * H * K * V, N * H * NG,
        address('do', do, (B, T, H, V)),
        address('dht', dht, (N, H, K, V), FLOAT32, optional=True),
        address('q', q, (B, T, H, K), FLOAT32),
        address('k', k, (B, T, H, K), FLOAT32),
        address('v', v, (B, T, H, V)),
        address('beta', beta, (B, T, H) if per_head else (B, T, H, V)),
        gate_of(g, B, T, H, V),
        address('D', D, (H, V), FLOAT32, optional=True),
        address('z', z, (B * T, H * V), stride=z_stride, optional=True), z_stride,
        boundaries(B, T, args.cu_seqlens),
        address('states', states, (NS, H, K, V), FLOAT32), NS,
        address('dqk', dqk, dqk.shape, FLOAT32),
        address('dv', dv, of_channel),
        address('dbeta', dbeta, dbeta.shape),
        0 if dg is None else address('dg', dg, dg.shape, FLOAT32), 0 if dg is None else dg.numel(),
        address('dh0', dh0, (N, H, K, V), FLOAT32, optional=True),
        address('dD', dD, (N, H, V), FLOAT32, optional=True),
        address('dz', dz, of_channel, optional=True),
        H, K, V, C, BG, BT, NT, args.exact, per_head, tuple(args.step_options), is_varlen, BITS[dtype], BITS[dbeta_dtype],
    )
    dq, dk = add_parts(dqk)[..., :K].unbind(-2)
    if per_head:
        dbeta = add_parts(dbeta)
    dD = None if args.D is None or dD is None else add_parts(dD).to(args.D.dtype)
    dz = None if args.z is None or dz is None else dz.to(args.z.dtype)
    dh0 = None if dh0 is None else k_first(dh0, state_v_first).contiguous()
    # copies, because dq and dk must not share memory
    dq = scaled(dq, args.scale)
    dq, dk = (dx.to(x.dtype, memory_format=torch.contiguous_format, copy=True) for dx, x in ((dq, args.q), (dk, args.k)))
    if args.g is not None and dg is not None:
        dg = (add_parts(dg) if args.g.dim() == 3 else dg).to(args.g.dtype)
    return Gradients(
        q=dq,
        k=dk,
        v=dv.to(args.v.dtype),
        beta=dbeta.to(args.beta.dtype),
        initial_state=dh0,
        D=dD,
        z=dz,
        g=dg,
    )


def view_states(states: torch.Tensor, args: Arguments) -> torch.Tensor:
    return states


def common_dtype(*tensors) -> torch.dtype:
    """The dtype in which the loops take these: bfloat16 if all are, else float32."""
    return torch.bfloat16 if all(x is None or x.dtype is torch.bfloat16 for x in tensors) else torch.float32


def dense(x, dtype: torch.dtype = torch.float32):
    """`x`, contiguous and of `dtype`; copied only if it is not."""
    return None if x is None else x.to(dtype).resolve_neg().contiguous()


def gate_of(g, B: int, T: int, H: int, V: int) -> tuple[int, bool] | None:
    """The address of g, and whether there is one per head."""
    if g is None:
        return None
    per_head = g.dim() == 3
    return address('g', g, (B, T, H) if per_head else (B, T, H, V), FLOAT32), per_head


def rows_of(z, shape: tuple[int, ...], dtype: torch.dtype):
    """`z` `[B, T, H, V]` as rows `[B * T, H V]`, copied only if they are not dense, and the elements from one to the next."""
    B, T, H, V = shape
    size = H * V
    if stored('z', z, shape, optional=True) is None:
        return None, size
    over_B, over_T, over_H, over_V = z.stride()
    in_rows = (over_V == 1 or V == 1) and (over_H == V or H == 1) and (over_B == T * over_T or B == 1)
    if z.dtype is not dtype or not in_rows or T == 1 or over_T < size:
        return dense(z, dtype).view(B * T, size), size
    return z.as_strided((B * T, size), (over_T, 1)), over_T


def k_first(state, state_v_first: bool):
    return state.transpose(-1, -2) if state is not None and state_v_first else state


def scaled(q, scale: float):
    return q if scale == 1 else q.float() * scale


def add_parts(parts):
    """Sum over the first dimension, in NumPy's order, which does not depend on the number of threads."""
    return torch.from_numpy(parts.numpy().sum(0)) if len(parts) > 1 else parts[0]
