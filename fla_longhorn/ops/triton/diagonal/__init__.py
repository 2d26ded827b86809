"""The diagonal update (arXiv 2407.14207, Eq. 7) in Triton; the contract is :mod:`fla_longhorn.ops.triton`'s."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, or_empty
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import launch_key, strided_inputs, with_token_stride
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.backward import longhorn_bwd_segments
from fla_longhorn.ops.triton.diagonal.common import prepare_rows
from fla_longhorn.ops.triton.diagonal.configs import for_backward, for_forward
from fla_longhorn.ops.triton.diagonal.forward import longhorn_fwd_segments
from fla_longhorn.ops.triton.diagonal.step import longhorn_fwd_step


def diagonal_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    args, strides = strided_inputs(args, ('v', 'z'))
    B, T, H, K, V = args.sizes
    N, is_varlen = args.num_sequences, args.cu_seqlens is not None
    h0, ht, states = args.initial_state, final_state, None
    if pool is not None:
        h0 = ht = pool.states
    if args.output_final_state and ht is None:
        ht = args.q.new_empty(args.state_shape, dtype=torch.float32)
    if T == 1 and not is_varlen and not save_states:
        o = longhorn_fwd_step(args, strides, h0, ht, pool)
        return o, or_empty(ht, o), or_empty(None, o)

    L = segment_length(args, parallel, for_forward(*launch_key(args)).BV)
    if save_states:
        slots = num_checkpoints(B, T, N, checkpoint_interval(K), is_varlen)
        states = args.q.new_empty((slots, H, K, V), dtype=torch.float32)
    rows = prepare_rows(args, squares=False)
    if L <= T:
        decay, local = segments.summarize_segments(rows, args, L=L)
        h0 = segments.combine_segments(decay, local, h0, args, L=L, reverse=False, pool=pool)
    o = longhorn_fwd_segments(rows, args, strides, h0, ht, states, pool, L=L)
    return o, or_empty(ht, o), or_empty(states, o)


def diagonal_bwd(
    do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool,
) -> tuple[Tensor, ...]:
    args, strides = strided_inputs(args, ('v', 'z'))
    q, T = args.q, args.q.shape[1]
    do, strides['S_DO'] = with_token_stride(do)

    # twice as many segments as programs: backward runs two in turn, and the summaries' programs fit twice as often
    L = segment_length(args, parallel, for_backward(*launch_key(args)).BV, rounds=2)
    rows = prepare_rows(args, squares=L <= T)
    if L <= T:
        decay, local = segments.summarize_segments(rows, args, do, L=L)
        dht = None if dht is None else dht.float().contiguous()
        dh = segments.combine_segments(decay, local, dht, args, L=L, reverse=True)
    elif dht is None:
        dh = q.new_zeros(args.state_shape, dtype=torch.float32)
    else:
        dh = dht.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    dq, dk, dv, dbeta, dD, dz = longhorn_bwd_segments(rows, args, strides, do, dh, states, L=L)
    dh0 = None if args.initial_state is None else first_segments(dh, args, L)
    return tuple(q.new_empty(0) if x is None else x for x in (dq, dk, dv, dbeta, dh0, dD, dz))


def first_segments(x: Tensor, args: Arguments, L: int) -> Tensor:
    """The slots of each sequence's first segment in `x`, which has a slot for each segment of L tokens."""
    if args.cu_seqlens is None:
        return x[::len(x) // args.num_sequences].contiguous()
    bos = args.cu_seqlens[:-1]
    return x[bos // L + torch.arange(len(bos), dtype=bos.dtype, device=bos.device)]


def segment_length(args: Arguments, parallel: bool, channels: int, rounds: int = 1) -> int:
    """Segment length in tokens, for programs of one warp with `channels` channels each."""
    _, T, H, K, V = args.sizes
    if not parallel:
        return segments.one_segment(T, K)
    return segments.choose_segment_length(T, args.num_sequences * H * triton.cdiv(V, channels), K, args.q.device, rounds)
