"""Context parallelism: packed sequences in contiguous parts, one on each rank of a group (fla's `FLACPContext`).

A rank's part begins inside a sequence that earlier ranks began, if `pre_num_ranks` is not 0, and ends inside one that later
ranks finish, if `post_num_ranks` is not 0. What passes between ranks is the state there, and its gradient the other way.

The diagonal update is elementwise, so a part is summarised by what it does to any state: `decay * state + local`. All ranks
gather all summaries, two `[H, K, V]` each, and every rank folds those that lie before it: one exchange, whatever the number
of ranks. A token of the exact update multiplies the state by a matrix, another one in each channel, so its summary would be
`[H, V, K, K]`; there the state itself, `[H, K, V]`, goes from rank to rank, each waiting for the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_longhorn.ops import operator
from fla_longhorn.ops.context_parallel.summaries import backward_summary, forward_summary
from fla_longhorn.ops.inputs import check_cp_context, check_inputs
from fla_longhorn.ops.operator import longhorn_bwd, longhorn_fwd

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


@dataclass(frozen=True)
class Part:
    """This rank's part: how many ranks before and after it hold its first and its last sequence, and where these lie."""

    group: dist.ProcessGroup
    rank: int
    before: int
    after: int
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, context: FLACPContext) -> Part:
        bounds = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
        return cls(
            context.group, dist.get_rank(context.group), context.pre_num_ranks, context.post_num_ranks, tuple(bounds.tolist()),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.bounds) - 1

    @property
    def head(self) -> slice:
        return slice(0, self.bounds[1])

    @property
    def tail(self) -> slice:
        return slice(self.bounds[-2], self.bounds[-1])

    @property
    def inside(self) -> bool:
        """Whether a state passes through: all of the part is the middle of one sequence."""
        return self.num_sequences == 1 and self.before > 0 and self.after > 0


@dataclass(frozen=True)
class Options:
    scale: float
    exact: bool
    use_beta_sigmoid: bool
    save_states: bool
    parallel: bool


@torch.compiler.disable
def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    exact: bool,
    D: Tensor | None,
    z: Tensor | None,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    cp_context: FLACPContext,
    parallel: bool,
) -> tuple[Tensor, None]:
    """Check the arguments and call the operator on this rank's part. All ranks of the group call it, in the same order."""
    check_cp_context(cp_context, initial_state, output_final_state)
    cu_seqlens = cp_context.cu_seqlens
    check_inputs(
        q, k, v, beta, scale=scale, initial_state=None, exact=exact, D=D, z=z, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cp_context.cu_seqlens_cpu, state_v_first=state_v_first, cu_seqlens_name='cp_context.cu_seqlens',
    )
    if cp_context.group is None or dist.get_world_size(cp_context.group) == 1:
        return operator.run(
            q, k, v, beta, scale=scale, initial_state=None, output_final_state=False, exact=exact, D=D, z=z,
            use_beta_sigmoid=use_beta_sigmoid, state_v_first=state_v_first, cu_seqlens=cu_seqlens, parallel=parallel,
        )
    save_states = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, beta, D, z))
    options = Options(1.0 if scale is None else float(scale), exact, use_beta_sigmoid, save_states, parallel)
    function = RingFunction if exact else GatherFunction
    return function.apply(q, k, v, beta, D, z, cu_seqlens, Part.of(cp_context), options), None


def call_fwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, D: Tensor | None, z: Tensor | None, cu_seqlens: Tensor | None,
    h0: Tensor | None, options: Options, output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return longhorn_fwd(
        q, k, v, beta, options.scale, h0, D, z, cu_seqlens, options.exact, options.use_beta_sigmoid, False,
        output_final_state, options.save_states, options.parallel,
    )


def call_bwd(
    do: Tensor, dht: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, D: Tensor | None, z: Tensor | None,
    cu_seqlens: Tensor | None, h0: Tensor | None, states: Tensor, options: Options,
) -> tuple[Tensor, ...]:
    return longhorn_bwd(
        do, dht, q, k, v, beta, options.scale, h0, D, z, cu_seqlens, states, options.exact, options.use_beta_sigmoid, False,
        options.parallel,
    )


def state_at(row: int, state: Tensor, N: int) -> Tensor:
    """States `[N, H, K, V]` that are zero but for one sequence's, `[1, H, K, V]`."""
    states = state.new_zeros(N, *state.shape[1:])
    states[row] = state[0]
    return states


class GatherFunction(torch.autograd.Function):
    """The diagonal update: one all-gather of summaries forward, one backward."""

    @staticmethod
    def forward(ctx, q, k, v, beta, D, z, cu_seqlens, part: Part, options: Options):
        H, K, V = *q.shape[2:], v.shape[-1]
        N = part.num_sequences
        cu_seqlens = None if N == 1 else cu_seqlens
        summary = q.new_zeros(2, 1, H, K, V, dtype=torch.float32)
        if part.after:
            decay, local = forward_summary(
                k[:, part.tail], v[:, part.tail], beta[:, part.tail], with_decay=part.inside,
                use_beta_sigmoid=options.use_beta_sigmoid,
            )
            summary[1] = local
            if decay is not None:
                summary[0] = decay
        h0 = fold(summary, part, range(part.rank - part.before, part.rank))
        h0 = state_at(0, h0, N) if part.before else None
        o, _, states = call_fwd(q, k, v, beta, D, z, cu_seqlens, h0, options, output_final_state=False)
        ctx.save_for_backward(q, k, v, beta, D, z, cu_seqlens, h0, states, summary[0].clone() if part.inside else None)
        ctx.part, ctx.options = part, options
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, beta, D, z, cu_seqlens, h0, states, decay = ctx.saved_tensors
        part, options = ctx.part, ctx.options
        H, K, V = *q.shape[2:], v.shape[-1]
        summary = q.new_zeros(2, 1, H, K, V, dtype=torch.float32)
        if part.before:
            head = part.head
            summary[1] = backward_summary(
                do[:, head], q[:, head], k[:, head], v[:, head], beta[:, head], None if z is None else z[:, head], states,
                scale=options.scale, use_beta_sigmoid=options.use_beta_sigmoid, parallel=options.parallel,
            )
            if decay is not None:
                summary[0] = decay
        dht = fold(summary, part, range(part.rank + part.after, part.rank, -1))
        dht = state_at(-1, dht, part.num_sequences) if part.after else None
        dq, dk, dv, dbeta, _, dD, dz = call_bwd(do, dht, q, k, v, beta, D, z, cu_seqlens, h0, states, options)
        return dq, dk, dv, dbeta, None if D is None else dD, None if z is None else dz, None, None, None


def fold(summary: Tensor, part: Part, ranks: range) -> Tensor:
    """Gather the ranks' summaries `[2, 1, H, K, V]`; what a state of zero becomes on its way over `ranks`."""
    gathered = [torch.empty_like(summary) for _ in range(dist.get_world_size(part.group))]
    dist.all_gather(gathered, summary, group=part.group)
    state = torch.zeros_like(summary[0])
    for rank in ranks:
        decay, local = gathered[rank]
        state = decay * state + local
    return state


@dataclass(frozen=True)
class Piece:
    """Sequences that run together, and whether their first state comes from, their last one goes to, another rank."""

    tokens: slice
    cu_seqlens: Tensor | None
    num_sequences: int
    receives: bool
    sends: bool


def pieces_of(part: Part, cu_seqlens: Tensor) -> list[Piece]:
    """One piece; or two where a state comes and another one goes, so that what goes need not wait for what comes."""
    N, T = part.num_sequences, part.bounds[-1]
    if N == 1 or not (part.before and part.after):
        return [Piece(slice(0, T), None if N == 1 else cu_seqlens, N, part.before > 0, part.after > 0)]
    first = part.bounds[1]
    rest = None if N == 2 else cu_seqlens[1:] - first
    return [Piece(part.head, None, 1, True, False), Piece(slice(first, T), rest, N - 1, False, True)]


class RingFunction(torch.autograd.Function):
    """The exact update: the state goes from each rank to the next, its gradient back."""

    @staticmethod
    def forward(ctx, q, k, v, beta, D, z, cu_seqlens, part: Part, options: Options):
        shape = (1, *q.shape[2:], v.shape[-1])
        pieces = pieces_of(part, cu_seqlens)
        outputs, saved, sent = [], [], []
        for piece in reversed(pieces):
            h0 = None
            if piece.receives:
                h0 = state_at(0, receive(part, part.rank - 1, shape, q.device), piece.num_sequences)
            o, ht, states = call_fwd(
                *take(piece, q, k, v, beta), D, *take(piece, z), piece.cu_seqlens, h0, options, output_final_state=piece.sends,
            )
            if piece.sends:
                sent.append(send(part, part.rank + 1, ht[-1:]))
            outputs.insert(0, o)
            saved[:0] = h0, states
        wait(sent)
        ctx.save_for_backward(q, k, v, beta, D, z, *saved)
        ctx.part, ctx.options, ctx.pieces = part, options, pieces
        return join(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, beta, D, z, *saved = ctx.saved_tensors
        part, options = ctx.part, ctx.options
        shape = (1, *q.shape[2:], v.shape[-1])
        gradients, sent = [], []
        for piece, h0, states in zip(ctx.pieces, saved[::2], saved[1::2], strict=True):
            dht = None
            if piece.sends:
                dht = state_at(-1, receive(part, part.rank + 1, shape, q.device), piece.num_sequences)
            *dx, dh0, dD, dz = call_bwd(
                *take(piece, do), dht, *take(piece, q, k, v, beta), D, *take(piece, z), piece.cu_seqlens, h0, states, options,
            )
            if piece.receives:
                sent.append(send(part, part.rank - 1, dh0[:1]))
            gradients.append((*dx, None if z is None else dz, None if D is None else dD))
        wait(sent)
        *dx, dz, dD = zip(*gradients, strict=True)
        dD = None if D is None else sum(dD[1:], dD[0])
        dq, dk, dv, dbeta, dz = (join(parts) for parts in (*dx, dz))
        return dq, dk, dv, dbeta, dD, dz, None, None, None


def take(piece: Piece, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x[:, piece.tokens] for x in tensors]


def join(parts: Sequence[Tensor | None]) -> Tensor | None:
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, 1)


def receive(part: Part, rank: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    out = torch.empty(shape, dtype=torch.float32, device=device)
    dist.recv(out, group=part.group, group_src=rank)
    return out


def send(part: Part, rank: int, x: Tensor) -> tuple[dist.Work, Tensor]:
    """The work, and what must live until it is done."""
    x = x.contiguous()
    return dist.isend(x, group=part.group, group_dst=rank), x


def wait(sent: list[tuple[dist.Work, Tensor]]) -> None:
    for work, _ in sent:
        work.wait()
