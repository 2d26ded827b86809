"""A rank's part of the sequences, and calls of the operator on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fla_longhorn.ops.arguments import DIFFERENTIABLE, Arguments, Gradients
from fla_longhorn.ops.autograd import gradients_of, longhorn_fwd

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext

# what a rank has of its own; the states come from other ranks
INPUTS = tuple(name for name in DIFFERENTIABLE if name != 'initial_state')
# an operator's tensors, by the name of the argument
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """This rank's part: `before` ranks hold earlier tokens of its first sequence, `after` ranks later ones of its last."""

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
        """Whether the part is the middle of one sequence, so that a state passes through."""
        return self.num_sequences == 1 and self.before > 0 and self.after > 0


@dataclass(frozen=True)
class Call:
    """A call of the operator on this rank's part; `args` lacks the tensors."""

    args: Arguments
    part: Part
    save_states: bool
    parallel: bool

    def fwd(
        self, tensors: Tensors, cu_seqlens: Tensor | None, h0: Tensor | None, *, output_final_state: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        args = self.args._replace(cu_seqlens=cu_seqlens, initial_state=h0, output_final_state=output_final_state, **tensors)
        return longhorn_fwd(*args, self.save_states, self.parallel)[:3]

    def bwd(
        self, do: Tensor, dht: Tensor | None, states: Tensor, tensors: Tensors, cu_seqlens: Tensor | None, h0: Tensor | None,
    ) -> Gradients:
        args = self.args._replace(cu_seqlens=cu_seqlens, initial_state=h0, **tensors)
        return gradients_of(do, dht, states, args, parallel=self.parallel)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """`x` of each rank, in their order; fla's `all_gather_into_tensor` fails with gloo."""
    x = x.contiguous()
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, x, group=group)
    return gathered


def of_tokens(tensors: Tensors, tokens: slice) -> dict[str, Any]:
    """These tokens of a call's inputs; D has none."""
    return {name: x if x is None or name == 'D' else x[:, tokens] for name, x in tensors.items()}


def state_at(row: int, state: Tensor, N: int) -> Tensor:
    """States `[N, H, K, V]` of zeros, but `state [1, H, K, V]` in one row."""
    states = state.new_zeros(N, *state.shape[1:])
    states[row] = state[0]
    return states
