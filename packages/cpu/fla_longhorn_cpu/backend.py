"""Both updates on the CPU, compiled by Numba on the first call (seconds; the machine code is cached on disk).

This file passes tensors in the order and layout of the loops (:mod:`fla_longhorn_cpu.forward`) and chooses the number of
threads. float32 tensors are passed without a copy, and so are v, z, beta and the output if all are bfloat16; others are
converted, g always to float32. Results are bit-equal for any number of threads, with or without conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fla_kit.numba import notice
from fla_kit.numba.launch import MIN_PARALLEL_STEPS, boundaries, launch
from fla_kit.numba.memory import BITS
from fla_kit.numba.simd import W as LANES
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn_cpu import backward, forward, places
from fla_longhorn_cpu.forward import block_size
from fla_longhorn_cpu.mixer import mix_tokens as mix_tokens
from fla_longhorn_cpu.wide import W

# bytes of the states of a strip in backward (L2 cache)
L2_BYTES = 2**18

# whatever the caller's default dtype and device are
FLOAT32: Any = dict(dtype=torch.float32, device='cpu')

_ABSENT = {dtype: np.empty(0, bits) for dtype, bits in BITS.items()}


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: torch.Tensor | None = None, pool: Pool | None = None,
):
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`.

    Blocks of channels run in parallel; `parallel` has no effect. A given `final_state` is written and returned; it may be
    `initial_state`, because each block reads its initial state before it writes its final one. The loops update the rows of a
    pool in place, or with `state_v_first` copies of them.
    """
    if args.q.shape[1] == 1 and not save_states and is_step(args):
        if pool is not None:
            return step(args, pool.states, places.in_pool(pool, len(args.q))), None, None
        if final_state is not None and final_state is args.initial_state:
            where = places.in_order(len(args.q), final_state.stride(0), True, True)
            return step(args, dense('states', final_state), where), final_state, None
    B, T, H, K, V = args.sizes
    N, state_v_first, is_varlen = args.num_sequences, args.state_v_first, args.cu_seqlens is not None
    if pool is not None and state_v_first:
        o, last, states = longhorn_fwd(args._replace(initial_state=pool.gather(N)), save_states=save_states, parallel=parallel)
        pool.scatter(last)
        return pool.without_absent(o, args.cu_seqlens), last, states
    C = checkpoint_interval(K) if save_states else T
    given, output_final_state = final_state, args.output_final_state or final_state is not None
    if given is None or state_v_first:
        final_state = torch.empty((N, H, K, V) if output_final_state and pool is None else 0, **FLOAT32)
    if pool is None:
        where = places.in_order(N, H * K * V, args.initial_state is not None, output_final_state)
        h0, ht = flat(k_first(args.initial_state, state_v_first)), flat_output('final_state', final_state)
    else:
        where = places.in_pool(pool, N)
        h0 = ht = places.span(pool.states)
    # the loops skip sequences without a row
    dtype = common_dtype(args.v, args.beta, args.z)
    o = (torch.empty if len(where) == N else torch.zeros)(args.v.shape, dtype=dtype, device='cpu')
    # packed sequences leave some slots unwritten; they hold zeros
    new = torch.zeros if is_varlen else torch.empty
    states = new((num_checkpoints(B, T, N, C, is_varlen), H, K, V) if save_states else 0, **FLOAT32)
    BV = block_size(K, T)
    launch(
        forward.forward, B * T * H * K * V, len(where) * H * -(-V // BV),
        flat(scaled(args.q, args.scale)), flat(args.k), flat(args.v, dtype), flat(args.beta, dtype),
        None if args.g is None else (flat(args.g), args.g.dim() == 3), h0, flat_copy(args.D),
        *flat_rows(args.z, H * V, dtype), boundaries(B, T, args.cu_seqlens), where,
        flat_output('o', o, dtype), ht, flat_output('states', states),
        H, K, V, C, BV, args.exact, args.beta.dim() == 3, tuple(args.step_options), is_varlen,
    )
    if final_state is not None and output_final_state and state_v_first:
        final_state = final_state.transpose(-1, -2)
        final_state = final_state.contiguous() if given is None else given.copy_(final_state)
    return o.to(args.v.dtype), final_state, states


def is_step(args: Arguments) -> bool:
    """Whether :func:`step` can run the call: inputs of one dtype, one token per row, too few rows for several threads."""
    if args.cu_seqlens is not None or args.state_v_first or args.scale != 1:
        return False
    if args.q.numel() * args.v.shape[-1] >= MIN_PARALLEL_STEPS:
        return False
    dtype = args.q.dtype
    if dtype not in BITS or (args.D is not None and args.D.dtype not in BITS):
        return False
    # faster than a generator
    for x in (args.q, args.k, args.v, args.beta, args.z):
        if x is not None and (x.dtype is not dtype or x.is_neg()):
            return False
    return args.g is None or not args.g.is_neg()


def step(args: Arguments, states: torch.Tensor, where: np.ndarray) -> torch.Tensor:
    """The outputs of one token per sequence; `states` are updated in place, those of each sequence at the place in `where`.

    The loops take addresses: making a NumPy array takes longer than the computation, and torch could no longer resize the
    memory of `D`, as FSDP2 does to free parameters.
    """
    (N, _, H, K), V = args.q.shape, args.v.shape[-1]
    given = args.q, args.k, args.v, args.beta, args.D, args.z
    g = None if args.g is None else args.g.float().contiguous()
    inputs = [x if x is None or x.is_contiguous() else x.contiguous() for x in given]
    o = torch.empty_like(args.v, memory_format=torch.contiguous_format)
    if len(where) < N:
        # sequences without a row have outputs of zero
        o.zero_()
    p_q, p_k, p_v, p_beta, p_D, p_z = [0 if x is None else x.data_ptr() for x in inputs]
    gate = None if g is None else (g.data_ptr(), g.dim() == 3)
    notice.call(
        forward.step, p_q, p_k, p_v, p_beta, gate, p_D, p_z, o.data_ptr(), states.data_ptr(), where, N, H, K, V,
        block_size(K, 1), args.exact, args.beta.dim() == 3, tuple(args.step_options),
        BITS[o.dtype], BITS[o.dtype if args.D is None else args.D.dtype],
    )
    return o


def longhorn_bwd(do, dht, states, args: Arguments, *, parallel: bool):
    """Return the gradients of q, k, v, beta, initial_state, D, z and g, each like its input, or `None`.

    A block of `BG` channels writes its part of dq and dk, `KP` wide, which are added here. With `BG >= 2 * KP` channels in a
    block, the parts take no more memory than v.
    """
    q, k, v, beta, D, z, g = args.q, args.k, args.v, args.beta, args.D, args.z, args.g
    B, T, H, K, V = args.sizes
    N, C, state_v_first = args.num_sequences, checkpoint_interval(K), args.state_v_first
    is_scalar, is_varlen = beta.dim() == 3, args.cu_seqlens is not None
    KP = -(-K // LANES) * LANES
    BG = min(-(-max(2 * KP, 128) // W), -(-V // W)) * W
    NG = -(-V // BG)
    NT = min(C, T)
    BT = min(NT, max(L2_BYTES // (4 * K * W), 16))
    dqk = torch.empty(NG, *q.shape[:-1], 2, KP, **FLOAT32)
    dtype = common_dtype(do, v, beta, z)
    dv = torch.empty(v.shape, dtype=dtype, device='cpu')
    # a head's have a float32 part per block
    dbeta_dtype = torch.float32 if is_scalar else dtype
    dbeta = torch.empty((NG, *beta.shape) if is_scalar else beta.shape, dtype=dbeta_dtype, device='cpu')
    gate, dg = None, None
    if g is not None:
        gate, dg = (flat(g), g.dim() == 3), torch.empty((NG, *g.shape) if g.dim() == 3 else g.shape, **FLOAT32)
    dh0: Any = torch.empty(0 if args.initial_state is None else (N, H, K, V), **FLOAT32)
    dD: Any = torch.zeros(0 if D is None else (N, H, V), **FLOAT32)
    dz: Any = torch.empty(0 if z is None else z.shape, dtype=dtype, device='cpu')
    launch(
        backward.backward, B * T * H * K * V, N * H * NG,
        flat(do, dtype), flat(k_first(dht, state_v_first)), flat(scaled(q, args.scale)), flat(k), flat(v, dtype),
        flat(beta, dtype), gate, flat_copy(D), *flat_rows(z, H * V, dtype), boundaries(B, T, args.cu_seqlens), flat(states),
        flat_output('dqk', dqk), flat_output('dv', dv, dtype), flat_output('dbeta', dbeta, dbeta_dtype),
        None if dg is None else flat_output('dg', dg), flat_output('dh0', dh0), flat_output('dD', dD),
        flat_output('dz', dz, dtype),
        H, K, V, C, BG, BT, NT, args.exact, is_scalar, tuple(args.step_options), is_varlen,
    )
    dq, dk = add_parts(dqk)[..., :K].unbind(-2)
    if is_scalar:
        dbeta = add_parts(dbeta)
    dD = None if D is None else add_parts(dD).to(D.dtype)
    dz = None if z is None else dz.to(z.dtype)
    dh0 = None if args.initial_state is None else k_first(dh0, state_v_first).contiguous()
    # copies, because dq and dk must not share memory
    dq = scaled(dq, args.scale)
    dq, dk = (dx.to(x.dtype, memory_format=torch.contiguous_format, copy=True) for dx, x in ((dq, q), (dk, k)))
    of_g = None if g is None or dg is None else (add_parts(dg) if g.dim() == 3 else dg).to(g.dtype)
    return dq, dk, dv.to(v.dtype), dbeta.to(beta.dtype), dh0, dD, dz, of_g


def view_states(states: torch.Tensor, args: Arguments) -> torch.Tensor:
    return states


def forward_summary(args: Arguments) -> None:
    return None


def backward_summary(do: torch.Tensor, args: Arguments) -> None:
    return None


def common_dtype(*tensors) -> torch.dtype:
    """The dtype in which the loops take these: bfloat16 if all are, else float32."""
    return torch.bfloat16 if all(x is None or x.dtype is torch.bfloat16 for x in tensors) else torch.float32


def flat(x, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The tensor's elements in order as `dtype` (one of `BITS`), copied only if strided or of another dtype."""
    if x is None:
        return _ABSENT[dtype]
    x = (x.detach() if x.requires_grad else x).to(dtype).contiguous()
    return (x if dtype is torch.float32 else x.view(torch.uint16)).numpy().reshape(-1)


def flat_output(name: str, x, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """:func:`flat` of a buffer that the loops write to, which must not be copied."""
    return flat(dense(name, x, dtype), dtype)


def dense(name: str, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if x.dtype is not dtype or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        raise RuntimeError(
            f'internal error: {name} is written in place, so it must be dense {dtype} on the CPU, got {x.dtype} of '
            f'strides {x.stride()} on {x.device}'
        )
    return x


def flat_rows(x, size: int, dtype: torch.dtype) -> tuple[np.ndarray, int]:
    """:func:`flat` of `x` `[B, T, H, V]` and its token stride, which may exceed `size = H * V`."""
    if x is None or x.is_contiguous() or x.dtype is not dtype:
        return flat(x, dtype), size
    (B, T, H, V), (over_B, over_T, over_H, over_V) = x.shape, x.stride()
    dense = (over_V == 1 or V == 1) and (over_H == V or H == 1)
    if not dense or T == 1 or over_T < size or (over_B != T * over_T and B > 1):
        return flat(x, dtype), size
    span = x.detach().as_strided(((B * T - 1) * over_T + size,), (1,))
    return flat(span, dtype), over_T


def flat_copy(x) -> np.ndarray:
    """:func:`flat` of a copy of a parameter: torch cannot resize memory that NumPy uses, as FSDP2 does to free parameters."""
    return flat(None if x is None else x.detach().clone())


def k_first(state, state_v_first: bool):
    return state.transpose(-1, -2) if state is not None and state_v_first else state


def scaled(q, scale: float):
    return q if scale == 1 else q.float() * scale


def add_parts(parts):
    """Sum over the first dimension, in NumPy's order, which does not depend on the number of threads."""
    return torch.from_numpy(parts.numpy().sum(0)) if len(parts) > 1 else parts[0]
