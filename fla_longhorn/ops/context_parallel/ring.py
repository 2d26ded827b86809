"""The exact update over several ranks: each sends the state to the next, and its gradient to the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fla_longhorn.ops.context_parallel.part import INPUTS, Call, Part, Tensors, of_tokens, state_at


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
    def forward(ctx, call: Call, cu_seqlens, *inputs):
        tensors, part = dict(zip(INPUTS, inputs, strict=True)), call.part
        shape, device = state_shape(tensors), tensors['q'].device
        pieces = pieces_of(part, cu_seqlens)
        outputs: list[Tensor] = []
        saved: list[Tensor | None] = []
        sent: list[tuple[dist.Work | None, Tensor]] = []
        for piece in reversed(pieces):
            h0 = state_at(0, receive(part, part.rank - 1, shape, device), piece.num_sequences) if piece.receives else None
            own = of_tokens(tensors, piece.tokens)
            o, ht, states = call.fwd(own, piece.cu_seqlens, h0, output_final_state=piece.sends)
            if piece.sends:
                sent.append(send(part, part.rank + 1, ht[-1:]))
            outputs.insert(0, o)
            saved[:0] = h0, states
        wait(sent)
        ctx.save_for_backward(*inputs, *saved)
        ctx.call, ctx.pieces = call, pieces
        return join(outputs)

    @staticmethod
    def backward(ctx, do):
        everything, call, part = ctx.saved_tensors, ctx.call, ctx.call.part
        tensors, saved = dict(zip(INPUTS, everything, strict=False)), everything[len(INPUTS):]
        shape, device = state_shape(tensors), do.device
        gradients, sent = [], []
        for piece, h0, states in zip(ctx.pieces, saved[::2], saved[1::2], strict=True):
            dht = state_at(-1, receive(part, part.rank + 1, shape, device), piece.num_sequences) if piece.sends else None
            own = of_tokens(tensors, piece.tokens)
            dx = call.bwd(do[:, piece.tokens], dht, states, own, piece.cu_seqlens, h0)
            if piece.receives:
                sent.append(send(part, part.rank - 1, dx.initial_state[:1]))
            gradients.append(dx)
        wait(sent)
        of_inputs = {name: [getattr(dx, name) for dx in gradients] for name in INPUTS}
        return None, None, *(add(dx) if name == 'D' else join(dx) for name, dx in of_inputs.items())


def state_shape(tensors: Tensors) -> tuple[int, ...]:
    """That of one sequence's state, `[1, H, K, V]`."""
    return 1, *tensors['q'].shape[2:], tensors['v'].shape[-1]


def add(parts: Sequence[Any]) -> Any:
    return None if parts[0] is None else sum(parts[1:], parts[0])


def join(parts: Sequence[Tensor | None]) -> Tensor | None:
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat([x for x in parts if x is not None], 1)


def receive(part: Part, rank: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    out = torch.empty(shape, dtype=torch.float32, device=device)
    dist.recv(out, group=part.group, group_src=rank)
    return out


def send(part: Part, rank: int, x: Tensor) -> tuple[dist.Work | None, Tensor]:
    """Start sending; the returned tensor must live until the work is done."""
    x = x.detach().contiguous()
    return dist.isend(x, group=part.group, group_dst=rank), x


def wait(sent: list[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sent:
        if work is not None:
            work.wait()
