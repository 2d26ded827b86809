"""The diagonal update (arXiv 2407.14207, Eq. 7) in Triton; the contract is :mod:`fla_longhorn.ops.triton`'s."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.ops.triton.diagonal.backward import longhorn_bwd_segments
from fla_longhorn.ops.triton.diagonal.common import prepare_rows, with_token_stride
from fla_longhorn.ops.triton.diagonal.forward import longhorn_fwd_segments, longhorn_fwd_step


def diagonal_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    output_final_state: bool,
    save_states: bool,
    parallel: bool,
    final_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    V = v.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    h0 = None if initial_state is None else initial_state.contiguous()
    beta, D = beta.contiguous(), None if D is None else D.contiguous()
    ht = final_state
    if output_final_state and ht is None:
        ht = q.new_empty((N, H, V, K) if state_v_first else (N, H, K, V), dtype=torch.float32)
    (v, s_v), (z, s_z) = with_token_stride(v), (None, 0) if z is None else with_token_stride(z)
    options = dict(use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first)

    if T == 1 and cu_seqlens is None and not save_states:
        o = longhorn_fwd_step(q, k, v, beta, D, z, h0, ht, scale=scale, **options)
        return o, *(q.new_empty(0, dtype=torch.float32) if x is None else x for x in (ht, None))

    C, L = checkpoint_interval(K), segment_length(q, V, N, parallel)
    states = None
    if save_states:
        states = q.new_empty((num_checkpoints(B, T, N, C, cu_seqlens is not None), H, K, V), dtype=torch.float32)
    rows = prepare_rows(q, k, scale, squares=False)
    if L <= T:
        decay, local = segments.summarize_segments(
            rows, v, s_v, beta, None, 0, cu_seqlens, K=K, L=L, reverse=False, **options,
        )
        h0 = segments.combine_segments(decay, local, h0, cu_seqlens, N=N, T=T, L=L, reverse=False)
    o = longhorn_fwd_segments(rows, v, s_v, beta, D, z, s_z, h0, ht, states, cu_seqlens, K=K, L=L, C=C, **options)
    return o, *(q.new_empty(0, dtype=torch.float32) if x is None else x for x in (ht, states))


def diagonal_bwd(
    do: Tensor,
    dht: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    parallel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, K, V = q.shape[1], q.shape[3], v.shape[3]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dht = None if dht is None else dht.float().contiguous()
    beta, D = beta.contiguous(), None if D is None else D.contiguous()
    (v, s_v), (do, s_do) = with_token_stride(v), with_token_stride(do)
    z, s_z = (None, 0) if z is None else with_token_stride(z)
    dh0 = None if initial_state is None else torch.empty(initial_state.shape, dtype=torch.float32, device=q.device)
    options = dict(use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first)

    L = segment_length(q, V, N, parallel)
    rows = prepare_rows(q, k, scale, squares=True)
    if L <= T:
        decay, local = segments.summarize_segments(
            rows, do, s_do, beta, z, s_z, cu_seqlens, K=K, L=L, reverse=True, **options,
        )
        dht = segments.combine_segments(decay, local, dht, cu_seqlens, N=N, T=T, L=L, reverse=True)
    dq, dk, dv, dbeta, dD, dz = longhorn_bwd_segments(
        rows, q, k, v, s_v, beta, D, z, s_z, do, s_do, dht, dh0, states, cu_seqlens, scale=scale, L=L,
        C=checkpoint_interval(K), multiprocessors=segments.multiprocessor_count(q.device), **options,
    )
    return tuple(q.new_empty(0) if x is None else x for x in (dq, dk, dv, dbeta, dh0, dD, dz))


def segment_length(q: Tensor, V: int, N: int, parallel: bool) -> int:
    T, H, K = q.shape[1:]
    if not parallel:
        return segments.one_segment(T, K)
    return segments.choose_segment_length(T, N * H * triton.cdiv(V, 32), K, q.device)
