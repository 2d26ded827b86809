"""The exact update over several ranks: each sends the state to the next, and its gradient to the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fla_longhorn.ops.context_parallel.part import Call, Part, state_at

Given = TypeVar('Given', Tensor, None)


@dataclass(frozen=True)
class Piece:
    """Sequences of one call, and whether it receives their first state from a rank and sends their last one on."""

    tokens: slice
    cu_seqlens: Tensor | None
    num_sequences: int
    receives: bool
    sends: bool


def pieces_of(part: Part, cu_seqlens: Tensor) -> list[Piece]:
    """One piece, or two where one state comes and another goes, so that sending need not wait for receiving."""
    N, T = part.num_sequences, part.bounds[-1]
    if N == 1 or not (part.before and part.after):
        return [Piece(slice(0, T), None if N == 1 else cu_seqlens, N, part.before > 0, part.after > 0)]
    first = part.bounds[1]
    rest = None if N == 2 else cu_seqlens[1:] - first
    return [Piece(part.head, None, 1, True, False), Piece(slice(first, T), rest, N - 1, False, True)]


class RingFunction(torch.autograd.Function):
    """Each rank waits for its first sequence's state from the rank before."""

    @staticmethod
    def forward(ctx, q, k, v, beta, D, z, cu_seqlens, call: Call):
        part, shape = call.part, (1, *q.shape[2:], v.shape[-1])
        pieces = pieces_of(part, cu_seqlens)
        outputs: list[Tensor] = []
        saved: list[Tensor | None] = []
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for piece in reversed(pieces):
            h0 = state_at(0, receive(part, part.rank - 1, shape, q.device), piece.num_sequences) if piece.receives else None
            inputs = (*(take(piece, x) for x in (q, k, v, beta)), D, take(piece, z), piece.cu_seqlens, h0)
            o, ht, states = call.fwd(*inputs, output_final_state=piece.sends)
            if piece.sends:
                sent.append(send(part, part.rank + 1, ht[-1:]))
            outputs.insert(0, o)
            saved[:0] = h0, states
        wait(sent)
        ctx.save_for_backward(q, k, v, beta, D, z, *saved)
        ctx.call, ctx.pieces = call, pieces
        return join(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, beta, D, z, *saved = ctx.saved_tensors
        call, part = ctx.call, ctx.call.part
        shape = (1, *q.shape[2:], v.shape[-1])
        gradients, sent = [], []
        for piece, h0, states in zip(ctx.pieces, saved[::2], saved[1::2], strict=True):
            dht = state_at(-1, receive(part, part.rank + 1, shape, q.device), piece.num_sequences) if piece.sends else None
            inputs = (*(take(piece, x) for x in (q, k, v, beta)), D, take(piece, z), piece.cu_seqlens, h0)
            *dx, dh0, dD, dz = call.bwd(take(piece, do), dht, states, *inputs)
            if piece.receives:
                sent.append(send(part, part.rank - 1, dh0[:1]))
            gradients.append((*dx, None if z is None else dz, None if D is None else dD))
        wait(sent)
        *dx, dz, dD = zip(*gradients, strict=True)
        dD = None if D is None else sum(dD[1:], dD[0])
        dq, dk, dv, dbeta, dz = (join(parts) for parts in (*dx, dz))
        return dq, dk, dv, dbeta, dD, dz, None, None


def take(piece: Piece, x: Given) -> Given:
    return None if x is None else x[:, piece.tokens]


def join(parts: Sequence[Tensor | None]) -> Tensor | None:
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat([x for x in parts if x is not None], 1)


def receive(part: Part, rank: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    out = torch.empty(shape, dtype=torch.float32, device=device)
    dist.recv(out, group=part.group, group_src=rank)
    return out


def send(part: Part, rank: int, x: Tensor) -> tuple[dist.Work | None, Tensor]:
    """Start sending; the returned tensor must live until the work is done."""
    x = x.contiguous()
    return dist.isend(x, group=part.group, group_dst=rank), x


def wait(sent: list[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sent:
        if work is not None:
            work.wait()
