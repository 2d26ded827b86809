"""The diagonal update over several ranks: one all-gather of summaries forward, one backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_longhorn.ops.context_parallel.part import Call, Part, state_at
from fla_longhorn.ops.context_parallel.summaries import backward_summary, forward_summary


class GatherFunction(torch.autograd.Function):
    """Every rank composes the summaries of the ranks before it into its initial state."""

    @staticmethod
    def forward(ctx, q, k, v, beta, D, z, cu_seqlens, call: Call):
        part, (H, K), V = call.part, q.shape[2:], v.shape[-1]
        N = part.num_sequences
        cu_seqlens = None if N == 1 else cu_seqlens
        summary = q.new_zeros(2, 1, H, K, V, dtype=torch.float32)
        if part.after:
            tail = part.tail
            args = call.args._replace(q=k[:, tail], k=k[:, tail], v=v[:, tail], beta=beta[:, tail], cu_seqlens=None)
            decay, summary[1] = forward_summary(args, with_decay=part.inside)
            if decay is not None:
                summary[0] = decay
        incoming = fold(summary, part, range(part.rank - part.before, part.rank))
        h0 = state_at(0, incoming, N) if part.before else None
        o, _, states = call.fwd(q, k, v, beta, D, z, cu_seqlens, h0, output_final_state=False)
        ctx.save_for_backward(q, k, v, beta, D, z, cu_seqlens, h0, states, summary[0].clone() if part.inside else None)
        ctx.call = call
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, beta, D, z, cu_seqlens, h0, states, decay = ctx.saved_tensors
        call, part = ctx.call, ctx.call.part
        (H, K), V = q.shape[2:], v.shape[-1]
        summary = q.new_zeros(2, 1, H, K, V, dtype=torch.float32)
        if part.before:
            head = part.head
            z_head = None if z is None else z[:, head]
            args = call.args._replace(q=q[:, head], k=k[:, head], v=v[:, head], beta=beta[:, head], z=z_head, cu_seqlens=None)
            summary[1] = backward_summary(do[:, head], states, args, parallel=call.parallel)
            if decay is not None:
                summary[0] = decay
        incoming = fold(summary, part, range(part.rank + part.after, part.rank, -1))
        dht = state_at(-1, incoming, part.num_sequences) if part.after else None
        dq, dk, dv, dbeta, _, dD, dz = call.bwd(do, dht, states, q, k, v, beta, D, z, cu_seqlens, h0)
        return dq, dk, dv, dbeta, None if D is None else dD, None if z is None else dz, None, None


def fold(summary: Tensor, part: Part, ranks: range) -> Tensor:
    """Gather all ranks' summaries `[2, 1, H, K, V]` and return what a state of zero becomes after those of `ranks`."""
    gathered = [torch.empty_like(summary) for _ in range(dist.get_world_size(part.group))]
    dist.all_gather(gathered, summary, group=part.group)
    state = torch.zeros_like(summary[0])
    for rank in ranks:
        decay, local = gathered[rank]
        state = decay * state + local
    return state
