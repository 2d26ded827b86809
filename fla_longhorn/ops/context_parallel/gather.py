"""The diagonal update over several ranks: one all-gather of summaries forward, one backward."""

from __future__ import annotations

import torch
from torch import Tensor

from fla_longhorn.ops.context_parallel.part import INPUTS, Call, Part, Tensors, all_gather, of_tokens, state_at
from fla_longhorn.ops.context_parallel.summaries import backward_summary, forward_summary


class GatherFunction(torch.autograd.Function):
    """Every rank composes the summaries of the ranks before it into its initial state."""

    @staticmethod
    def forward(ctx, call: Call, cu_seqlens, *inputs):
        tensors, part = dict(zip(INPUTS, inputs, strict=True)), call.part
        N = part.num_sequences
        cu_seqlens = None if N == 1 else cu_seqlens
        summary = empty_summary(tensors)
        if part.after:
            args = call.args._replace(**of_tokens(tensors, part.tail))
            decay, summary[1] = forward_summary(args, with_decay=part.inside)
            if decay is not None:
                summary[0] = decay
        incoming = fold(summary, part, range(part.rank - part.before, part.rank))
        h0 = state_at(0, incoming, N) if part.before else None
        o, _, states = call.fwd(tensors, cu_seqlens, h0, output_final_state=False)
        ctx.save_for_backward(cu_seqlens, h0, states, summary[0].clone() if part.inside else None, *inputs)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx, do):
        cu_seqlens, h0, states, decay, *inputs = ctx.saved_tensors
        tensors, call, part = dict(zip(INPUTS, inputs, strict=True)), ctx.call, ctx.call.part
        with torch.no_grad():
            summary = empty_summary(tensors)
            if part.before:
                args = call.args._replace(**of_tokens(tensors, part.head))
                summary[1] = backward_summary(do[:, part.head], states, args, parallel=call.parallel)
                if decay is not None:
                    summary[0] = decay
            incoming = fold(summary, part, range(part.rank + part.after, part.rank, -1))
            dht = state_at(-1, incoming, part.num_sequences) if part.after else None
        # the operator raises for second derivatives
        gradients = call.bwd(do, dht, states, tensors, cu_seqlens, h0)
        return None, None, *(getattr(gradients, name) for name in INPUTS)


def empty_summary(tensors: Tensors) -> Tensor:
    """Zeros `[2, 1, H, K, V]`: the decay and the state of no token's sequence."""
    q, v = tensors['q'], tensors['v']
    return q.new_zeros(2, 1, *q.shape[2:], v.shape[-1], dtype=torch.float32)


def fold(summary: Tensor, part: Part, ranks: range) -> Tensor:
    """Gather all ranks' summaries `[2, 1, H, K, V]` and return what a state of zero becomes after those of `ranks`."""
    gathered, state = all_gather(summary, part.group), torch.zeros_like(summary[0])
    for rank in ranks:
        decay, local = gathered[rank]
        state = decay * state + local
    return state
