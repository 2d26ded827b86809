"""The diagonal update (arXiv 2407.14207, Eq. 7) in Triton; the contract is :mod:`fla_longhorn.ops.triton`'s."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, or_empty
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton.common import with_token_stride
from fla_longhorn.ops.triton.device import multiprocessor_count
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.backward import longhorn_bwd_segments
from fla_longhorn.ops.triton.diagonal.common import prepare_rows
from fla_longhorn.ops.triton.diagonal.configs import for_blocks, for_forward
from fla_longhorn.ops.triton.diagonal.forward import longhorn_fwd_segments
from fla_longhorn.ops.triton.diagonal.step import longhorn_fwd_step


def diagonal_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None, pool: Pool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, cu_seqlens = args.q, args.k, args.cu_seqlens
    B, T, H, K, V = args.sizes
    N = args.num_sequences
    beta = args.beta.contiguous()
    h0, D = (None if x is None else x.contiguous() for x in (args.initial_state, args.D))
    ht = final_state
    if pool is not None:
        h0 = ht = pool.states
    if args.output_final_state and ht is None:
        ht = q.new_empty(args.state_shape, dtype=torch.float32)
    (v, s_v), (z, s_z) = with_token_stride(args.v), (None, 0) if args.z is None else with_token_stride(args.z)
    options = dict(use_beta_sigmoid=args.use_beta_sigmoid_in_kernel, state_v_first=args.state_v_first)

    if T == 1 and cu_seqlens is None and not save_states:
        o = longhorn_fwd_step(q, k, v, beta, D, z, h0, ht, pool, scale=args.scale, **options)
        return o, or_empty(ht, o), or_empty(None, o)

    interval, L = checkpoint_interval(K), segment_length(args, parallel, for_forward(K, V).BV)
    states = None
    if save_states:
        states = q.new_empty((num_checkpoints(B, T, N, interval, cu_seqlens is not None), H, K, V), dtype=torch.float32)
    rows = prepare_rows(q, k, args.scale, squares=False)
    if L <= T:
        decay, local = segments.summarize_segments(
            rows, v, s_v, beta, None, 0, cu_seqlens, K=K, L=L, reverse=False, **options,
        )
        h0 = segments.combine_segments(decay, local, h0, cu_seqlens, N=N, T=T, L=L, reverse=False, pool=pool)
    o = longhorn_fwd_segments(
        rows, v, s_v, beta, D, z, s_z, h0, ht, states, cu_seqlens, pool, K=K, L=L, interval=interval, **options,
    )
    return o, or_empty(ht, o), or_empty(states, o)


def diagonal_bwd(
    do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool,
) -> tuple[Tensor, ...]:
    q, k, cu_seqlens = args.q, args.k, args.cu_seqlens
    _, T, _, K, _ = args.sizes
    dht = None if dht is None else dht.float().contiguous()
    beta, D = args.beta.contiguous(), None if args.D is None else args.D.contiguous()
    (v, s_v), (do, s_do) = with_token_stride(args.v), with_token_stride(do)
    z, s_z = (None, 0) if args.z is None else with_token_stride(args.z)
    dh0 = None if args.initial_state is None else q.new_empty(args.state_shape, dtype=torch.float32)
    options = dict(use_beta_sigmoid=args.use_beta_sigmoid_in_kernel, state_v_first=args.state_v_first)

    # a program of the backward takes two segments, one after the other; of their summaries twice as many warps run at a time
    L = segment_length(args, parallel, for_blocks().BV, rounds=2)
    rows = prepare_rows(q, k, args.scale, squares=L <= T)
    if L <= T:
        decay, local = segments.summarize_segments(
            rows, do, s_do, beta, z, s_z, cu_seqlens, K=K, L=L, reverse=True, **options,
        )
        dht = segments.combine_segments(decay, local, dht, cu_seqlens, N=args.num_sequences, T=T, L=L, reverse=True)
    dq, dk, dv, dbeta, dD, dz = longhorn_bwd_segments(
        rows, q, k, v, s_v, beta, D, z, s_z, do, s_do, dht, dh0, states, cu_seqlens, scale=args.scale, L=L,
        interval=checkpoint_interval(K), multiprocessors=multiprocessor_count(q.device), **options,
    )
    return tuple(q.new_empty(0) if x is None else x for x in (dq, dk, dv, dbeta, dh0, dD, dz))


def segment_length(args: Arguments, parallel: bool, channels: int, rounds: int = 1) -> int:
    """Tokens to a segment, for programs of one warp with so many channels."""
    _, T, H, K, V = args.sizes
    if not parallel:
        return segments.one_segment(T, K)
    return segments.choose_segment_length(T, args.num_sequences * H * triton.cdiv(V, channels), K, args.q.device, rounds)
