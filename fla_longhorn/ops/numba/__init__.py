"""Both updates on the CPU, compiled by Numba on the first call (seconds, once: the machine code is kept on disk).

The backend's interface: tensors in the order and layout that the loops take (:mod:`fla_longhorn.ops.numba.forward`),
and how many threads run them. float32 tensors are passed as they are, without a copy, and so are v, z, beta and the output
where all are bfloat16; others are converted, here and back. Deterministic, and bit-equal for any number of threads and for
either way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fla_cpu.numba import notice
from fla_cpu.numba.launch import MIN_PARALLEL_STEPS, boundaries, launch
from fla_cpu.numba.memory import BITS
from fla_cpu.numba.simd import W as LANES
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.numba import backward, forward, places
from fla_longhorn.ops.numba.wide import W
from fla_longhorn.ops.pool import Pool

# bytes of a forward block's states (first cache), and of the states that backward keeps of a strip (second cache)
L1_BYTES, L2_BYTES = 2**14, 2**18

# what a caller's default dtype or device must not change
FLOAT32: Any = dict(dtype=torch.float32, device='cpu')

_ABSENT = {dtype: np.empty(0, bits) for dtype, bits in BITS.items()}


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: torch.Tensor | None = None, pool: Pool | None = None,
):
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`.

    Blocks of channels run in parallel, time doesn't: `parallel` changes nothing here. Where `final_state` is given it is
    written and returned; it may be `initial_state` itself, as each block reads its part of the one before it writes the other.
    The loops update the rows of a pool in place; in the other layout they work on copies.
    """
    B, T, H, K, V = args.sizes
    if T == 1 and final_state is not None and final_state is args.initial_state and not save_states and is_step(args):
        return step(args, final_state), final_state, None
    N, state_v_first, is_varlen = args.num_sequences, args.state_v_first, args.cu_seqlens is not None
    if pool is not None and state_v_first:
        o, last, states = longhorn_fwd(
            args._replace(initial_state=pool.gather(N)), save_states=save_states, parallel=parallel,
        )
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
    # a sequence without a row is left out
    dtype = common_dtype(args.v, args.beta, args.z)
    o = (torch.empty if len(where) == N else torch.zeros)(args.v.shape, dtype=dtype, device='cpu')
    # packed sequences leave slots that no one writes
    new = torch.zeros if is_varlen else torch.empty
    states = new((num_checkpoints(B, T, N, C, is_varlen), H, K, V) if save_states else 0, **FLOAT32)
    BV = block_size(K, T)
    launch(
        forward.forward, B * T * H * K * V, len(where) * H * -(-V // BV),
        flat(scaled(args.q, args.scale)), flat(args.k), flat(args.v, dtype), flat(args.beta, dtype), h0, flat_copy(args.D),
        *flat_rows(args.z, H * V, dtype), boundaries(B, T, args.cu_seqlens), where,
        flat_output('o', o, dtype), ht, flat_output('states', states),
        H, K, V, C, BV, args.exact, args.beta.dim() == 3, tuple(args.step_options), is_varlen,
    )
    if final_state is not None and output_final_state and state_v_first:
        final_state = final_state.transpose(-1, -2)
        final_state = final_state.contiguous() if given is None else given.copy_(final_state)
    return o.to(args.v.dtype), final_state, states


def is_step(args: Arguments) -> bool:
    """Whether :func:`step` serves a call: all inputs of one dtype, one token a row, few of them."""
    if args.cu_seqlens is not None or args.state_v_first or args.scale != 1:
        return False
    if args.q.numel() * args.v.shape[-1] >= MIN_PARALLEL_STEPS:
        return False
    dtype = args.q.dtype
    if dtype not in BITS or (args.D is not None and args.D.dtype not in BITS):
        return False
    # a generator takes longer
    for x in (args.q, args.k, args.v, args.beta, args.z):  # noqa: SIM110
        if x is not None and (x.dtype is not dtype or x.is_neg()):
            return False
    return True


def step(args: Arguments, states: torch.Tensor) -> torch.Tensor:
    """The outputs of one token a sequence; `states` `[N, H, K, V]` are updated in place.

    The loops are given addresses: an array of NumPy takes longer to make than to compute with, and its maker would keep torch
    from ever resizing the memory of `D`, as FSDP2 does to free parameters.
    """
    (N, _, H, K), V = args.q.shape, args.v.shape[-1]
    given = args.q, args.k, args.v, args.beta, in_place('states', states), args.D, args.z
    inputs = [x if x is None or x.is_contiguous() else x.contiguous() for x in given]
    o = torch.empty_like(args.v, memory_format=torch.contiguous_format)
    notice.call(
        forward.step, *[0 if x is None else x.data_ptr() for x in inputs], o.data_ptr(),
        N, H, K, V, block_size(K, 1), args.exact, args.beta.dim() == 3, tuple(args.step_options),
        BITS[o.dtype], BITS[o.dtype if args.D is None else args.D.dtype],
    )
    return o


def block_size(K: int, T: int) -> int:
    """Channels of a block: two vectors, for the threads' sake; a single token only reads its states, in long rows."""
    return min(max(L1_BYTES // (4 * K) // W, 1), 2 if T > 1 else 8) * W


def longhorn_bwd(do, dht, states, args: Arguments, *, parallel: bool):
    """Return the gradients of q, k, v, beta, initial_state, D and z, each like its input; an absent one's is empty.

    Blocks of channels, at least twice the keys `KP` of whole vectors, leave their parts of dq and dk to be added here.
    """
    q, k, v, beta, D, z = args.q, args.k, args.v, args.beta, args.D, args.z
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
    # parts are sums of float32
    dbeta_dtype = torch.float32 if is_scalar else dtype
    dbeta = torch.empty((NG, *beta.shape) if is_scalar else beta.shape, dtype=dbeta_dtype, device='cpu')
    dh0 = torch.empty(0 if args.initial_state is None else (N, H, K, V), **FLOAT32)
    dD = torch.zeros(0 if D is None else (N, H, V), **FLOAT32)
    dz = torch.empty(0 if z is None else z.shape, dtype=dtype, device='cpu')
    launch(
        backward.backward, B * T * H * K * V, N * H * NG,
        flat(do, dtype), flat(k_first(dht, state_v_first)), flat(scaled(q, args.scale)), flat(k), flat(v, dtype),
        flat(beta, dtype), flat_copy(D), *flat_rows(z, H * V, dtype), boundaries(B, T, args.cu_seqlens), flat(states),
        flat_output('dqk', dqk), flat_output('dv', dv, dtype), flat_output('dbeta', dbeta, dbeta_dtype),
        flat_output('dh0', dh0), flat_output('dD', dD), flat_output('dz', dz, dtype),
        H, K, V, C, BG, BT, NT, args.exact, is_scalar, tuple(args.step_options), is_varlen,
    )
    dq, dk = add_parts(dqk)[..., :K].unbind(-2)
    if is_scalar:
        dbeta = add_parts(dbeta)
    if args.initial_state is not None and state_v_first:
        dh0 = dh0.transpose(-1, -2).contiguous()
    dD = q.new_empty(0) if D is None else add_parts(dD).to(D.dtype)
    dz = q.new_empty(0) if z is None else dz.to(z.dtype)
    dh0 = q.new_empty(0) if args.initial_state is None else dh0
    # copies: dq and dk must not share memory
    dq = scaled(dq, args.scale)
    dq, dk = (dx.to(x.dtype, memory_format=torch.contiguous_format, copy=True) for dx, x in ((dq, q), (dk, k)))
    return dq, dk, dv.to(v.dtype), dbeta.to(beta.dtype), dh0, dD, dz


def common_dtype(*tensors) -> torch.dtype:
    """bfloat16 where all of these are, else float32: what the loops take them in."""
    return torch.bfloat16 if all(x is None or x.dtype is torch.bfloat16 for x in tensors) else torch.float32


def flat(x, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The tensor's elements in order as `dtype`, of those in `BITS`, without a copy where they are contiguous."""
    if x is None:
        return _ABSENT[dtype]
    x = (x.detach() if x.requires_grad else x).to(dtype).contiguous()
    return (x if dtype is torch.float32 else x.view(torch.uint16)).numpy().reshape(-1)


def flat_output(name: str, x, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The same of a buffer that the loops write to: they would fill a copy, and leave the buffer as it was."""
    return flat(in_place(name, x, dtype), dtype)


def in_place(name: str, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if x.dtype is not dtype or not x.is_cpu or not x.is_contiguous() or x.is_neg():
        raise RuntimeError(
            f'internal error: {name} is written in place, so it must be dense {dtype} on the CPU, got {x.dtype} of '
            f'strides {x.stride()} on {x.device}'
        )
    return x


def flat_rows(x, size: int, dtype: torch.dtype) -> tuple[np.ndarray, int]:
    """The same of `x` `[B, T, H, V]`, whose token stride may exceed their `size`, and that stride."""
    if x is None or x.is_contiguous() or x.dtype is not dtype:
        return flat(x, dtype), size
    (B, T, H, V), (over_B, over_T, over_H, over_V) = x.shape, x.stride()
    dense = (over_V == 1 or V == 1) and (over_H == V or H == 1)
    if not dense or T == 1 or over_T < size or (over_B != T * over_T and B > 1):
        return flat(x, dtype), size
    span = x.detach().as_strided(((B * T - 1) * over_T + size,), (1,))
    return flat(span, dtype), over_T


def flat_copy(x) -> np.ndarray:
    """The same of a parameter: torch never again resizes memory that NumPy has seen, as FSDP2 does to free parameters."""
    return flat(None if x is None else x.detach().clone())


def k_first(state, state_v_first: bool):
    return state.transpose(-1, -2) if state is not None and state_v_first else state


def scaled(q, scale: float):
    return q if scale == 1 else q.float() * scale


def add_parts(parts):
    """Sum over the first dimension, one part after the other: NumPy's order doesn't depend on the number of threads."""
    return torch.from_numpy(parts.numpy().sum(0)) if len(parts) > 1 else parts[0]
