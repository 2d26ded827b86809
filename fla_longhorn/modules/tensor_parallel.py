"""Tensor parallelism of a layer: its channels split over the ranks of a device mesh.

Channels are independent, so a rank runs the convolution and the operator on its own. The queries and keys belong to all
channels of a head: `x_proj` sums them over the ranks, and their gradients are summed over the ranks too. The styles of PyTorch
or transformers make the parameters DTensors; a layer is split if its `D` is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn as nn

# private, but what the public one names in its place: that is deprecated, and raises under `torch.compile`
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fla_longhorn.modules.direct import get_parameter


class Part(NamedTuple):
    """A rank's channels: whole heads, or a part of one."""

    mesh: DeviceMesh
    # heads of which the rank has channels
    heads: slice
    num_channels: int

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    def exchange(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """From this rank's columns `[B, T, 2 d / n]` of `[x, z]` to its channels `[B, T, d / n]` of x and of z.

        `[x, z]` is 2n blocks of columns. Rank r has the blocks 2r and 2r + 1, and needs the blocks r and n + r.
        """
        n, rank = self.mesh.size(), self.mesh.get_local_rank()
        blocks = y.unflatten(-1, (2, -1)).movedim(-2, 0)
        to = [2 * rank % n, (2 * rank + 1) % n]
        if to[0] > to[1]:
            blocks = blocks.flip(0)
        received, sent = ([ranks.count(i) for i in range(n)] for ranks in ([rank // 2, (n + rank) // 2], to))
        return all_to_all_single_autograd(blocks.contiguous(), received, sent, self.mesh.get_group()).unbind(0)

    def of_heads(self, x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """This rank's heads of `x` `[B, T, H, ...]`, which all ranks have; its gradient is summed over the ranks."""
        if x.requires_grad:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        return x.narrow(dim, self.heads.start, self.num_heads)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All channels, from this rank's `x` `[B, T, d / n]`."""
        return DTensor.from_local(x, self.mesh, [Shard(-1)], run_check=False).full_tensor()


def find_part(layer: Any) -> Part | None:
    """This rank's channels of a Longhorn layer, `None` if they are not split.

    Raises:
        ValueError: the mesh does not fit the layer.
    """
    D = get_parameter(layer, 'D')
    if not isinstance(D, DTensor):
        return None
    mesh, heads, channels = D.device_mesh, layer.num_heads, layer.intermediate_size
    if mesh.ndim != 1 or D.placements != (Shard(0),):
        raise ValueError(f'D must be split along one dimension of a mesh, got placements {D.placements} on {mesh}')
    n, rank = mesh.size(), mesh.get_local_rank()
    if channels % n or (heads % n and n % heads):
        raise ValueError(
            f'the tensor-parallel mesh must have a size that divides the {channels} channels, and divides num_heads = {heads} '
            f'or is a multiple of it, got {n}'
        )
    first = rank * heads // n
    return Part(mesh, slice(first, first + max(1, heads // n)), channels // n)


def distributed_as(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x`, which all ranks have, as a DTensor if `parameter` is one."""
    if not isinstance(parameter, DTensor):
        return x
    return distribute_tensor(x, parameter.device_mesh, parameter.placements, src_data_rank=None)


def check_heads(attention: Any) -> None:
    """Raise `ValueError` if a head of an attention layer of fla would be split over ranks."""
    weight = getattr(attention.k_proj, 'weight', None)
    n = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
    if attention.num_kv_heads % n:
        raise ValueError(
            f'the tensor-parallel mesh must have a size that divides num_kv_heads = {attention.num_kv_heads} of layer '
            f'{attention.layer_idx}, got {n}'
        )


class ShardParameters(ParallelStyle):
    """Make a module's own parameters DTensors with one placement; those named in `whole` are replicated."""

    def __init__(self, placement: Placement, whole: Collection[str] = ()) -> None:
        super().__init__()
        self.placement, self.whole = placement, whole

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, x in list(module.named_parameters(recurse=False)):
            placement = Replicate() if name in self.whole else self.placement
            x_parts = distribute_tensor(x, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(x_parts, requires_grad=x.requires_grad))
        return module


class LocalParameters(ShardParameters):
    """The same, with a forward that sees this rank's parts as plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole: list[dict[str, Any]] = []

        # in `_parameters`, which is private: `setattr` takes no plain tensor for a parameter, and `torch.compile` of
        # torch 2.11 does not see an attribute before it
        def enter(module: nn.Module, args: tuple) -> None:
            whole.append({name: x for name, x in module._parameters.items() if isinstance(x, DTensor)})
            module._parameters.update({name: x.to_local() for name, x in whole[-1].items()})

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            module._parameters.update(whole.pop())

        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module
