"""The recurrence as the paper writes it: the reference that every test compares with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops.arguments import Arguments, Result
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.inputs import check_inputs

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def naive_recurrent_longhorn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, exact: bool = False,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: FLACPContext | None = None, return_intermediate_states: bool = False,
    allow_neg_eigval: bool = False, g: torch.Tensor | None = None, disable_recompute: bool = False,
) -> Result:
    r"""Longhorn's update as one PyTorch loop over time.

    Equations, arguments, shapes, results and errors are those of :func:`fla_longhorn.ops.chunk_longhorn`; `cp_context` raises
    `ValueError`. Computes in float32, or in float64 if an input is float64, on any device; differentiable any number of times.
    In the paper's letters, K is the state size m, V the channels d, and v the input x.
    """
    args = Arguments(
        q, k, v, beta, 1.0 if scale is None else scale, initial_state, output_final_state, exact, D, z,
        use_beta_sigmoid_in_kernel, state_v_first, cu_seqlens, allow_neg_eigval, g, disable_recompute,
    )
    return check_and_recur(args, cu_seqlens_cpu, cp_context, return_intermediate_states)


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, eps: torch.Tensor, g: torch.Tensor | None, S: torch.Tensor, exact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of one token, `[B, 1, H, V]`, and the state `[B, H, K, V]` after it."""
    # [B, H, K, 1] and [B, H, 1, V]
    q, k, v, eps = q[:, 0, :, :, None], k[:, 0, :, :, None], v[:, 0, :, None], eps[:, 0, :, None]
    if g is not None:
        S = g[:, 0, :, None].exp() * S
    if exact:
        S = S + k * (eps * (v - (k * S).sum(-2, keepdim=True)))
    else:
        S = (1 - k.square() * eps) * S + k * (eps * v)
    return (q * S).sum(-2)[:, None], S


def check_and_recur(
    args: Arguments, cu_seqlens_cpu: torch.Tensor | None, cp_context: FLACPContext | None, intermediate: bool,
    advance: Callable = step, C: int = 1,
) -> Result:
    """The naive ops: :func:`recurrence` on arguments that are checked here."""
    if cp_context is not None:
        raise ValueError('cp_context must be None in the naive op, which runs on one rank; chunk_longhorn takes it')
    check_inputs(args, cu_seqlens_cpu, allow_float64=True)
    o, final_state, states = recurrence(args, cu_seqlens_cpu, advance, C)
    return (o, final_state, states) if intermediate else (o, final_state)


def recurrence(
    args: Arguments, cu_seqlens_cpu: torch.Tensor | None, advance: Callable = step, C: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The loop, on checked arguments; also returns the states before every `checkpoint_interval(K)`-th token.

    `advance` takes C tokens, or those that are left, as :func:`step` takes one.
    """
    _, T, H, K, V = args.sizes
    N, cu_seqlens, D, z = args.num_sequences, args.cu_seqlens, args.D, args.z
    is_double = any(x is not None and x.dtype == torch.float64 for x in args.differentiable)
    dtype = torch.float64 if is_double else torch.float32

    q, k, v, beta = (x.to(dtype) for x in (args.q, args.k, args.v, args.beta))
    if args.use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid()
    if beta.dim() == 3:
        beta = beta[..., None].expand_as(v)
    # [B, T, H, V]
    norm = k.square().sum(-1, keepdim=True)
    # NaN where the step size underflows, rather than a zero that looks valid
    eps = (2 if args.allow_neg_eigval else 1) * beta / (1 + beta * norm) + 0 * (4 * norm)

    g = None if args.g is None else args.g.to(dtype)
    g = g[..., None] if g is not None and g.dim() == 3 else g

    # (rows of the batch, first token, end) of each sequence
    if cu_seqlens is None:
        spans = [(slice(None), 0, T)]
    else:
        bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
        spans = [(slice(0, 1), bos, eos) for bos, eos in zip(bounds[:-1], bounds[1:], strict=True)]
    # [N, H, K, V]
    states = q.new_zeros(N, H, K, V) if args.initial_state is None else args.initial_state.to(dtype)
    if args.initial_state is not None and args.state_v_first:
        states = states.transpose(-1, -2)

    outputs, final_states, between = [], [], []
    for i, (rows, bos, eos) in enumerate(spans):
        S = states if cu_seqlens is None else states[i:i + 1]
        for t in range(bos, eos, C):
            if (t - bos) % checkpoint_interval(K) == 0:
                between.append(S)
            tokens = slice(t, min(t + C, eos))
            o, S = advance(*(None if x is None else x[rows, tokens] for x in (q, k, v, eps, g)), S, args.exact)
            outputs.append(o)
        final_states.append(S)

    o = torch.cat(outputs, 1) * args.scale
    if D is not None:
        o = o + D.to(dtype) * v
    if z is not None:
        o = o * torch.nn.functional.silu(z.to(dtype))
    final_state = None
    if args.output_final_state:
        final_state = torch.cat(final_states)
        if args.state_v_first:
            final_state = final_state.transpose(-1, -2)
    kept = torch.stack(between, 1)
    return o.to(args.v.dtype), final_state, kept.mT if args.state_v_first else kept
