"""Tensor parallelism: layers with their channels split over the ranks of a device mesh, by hooks that a plan installs.

Channels are independent, so a rank runs the convolution and the operator on its own. The queries and keys belong to all
channels of a head: `x_proj` sums them over the ranks, and their gradients are summed over the ranks too. The styles of PyTorch
or transformers make the parameters DTensors. `fla_longhorn.patch(packages=True)` gives transformers a plan for Longhorn
(`tp_plan='auto'`), as its models have one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn as nn
from fla.layers.attn import Attention

# private, but what the public one names in its place: that is deprecated, and raises under `torch.compile`
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from fla_longhorn.hosts import LINEAR
from fla_longhorn.layers import Longhorn
from fla_longhorn.models import LonghornConfig, LonghornForCausalLM
from fla_longhorn_extras import HEAD

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    'colwise': ColwiseParallel,
    'colwise_gather_output': lambda: ColwiseParallel(output_layouts=Replicate()),
    'rowwise': RowwiseParallel,
    'embedding_rowwise': lambda: RowwiseParallel(input_layouts=Replicate()),
}


class Part(NamedTuple):
    """A rank's channels: whole heads, or a part of one."""

    mesh: DeviceMesh
    # heads of which the rank has channels
    heads: slice

    def exchange(self, y: torch.Tensor) -> torch.Tensor:
        """From this rank's columns `[B, T, 2 d / n]` of `[x, z]` to its channels of x and those of z, `[B, T, 2 d / n]`.

        `[x, z]` is 2n blocks of columns. Rank r has the blocks 2r and 2r + 1, and needs the blocks r and n + r.
        """
        n, rank = self.mesh.size(), self.mesh.get_local_rank()
        blocks = y.unflatten(-1, (2, -1)).movedim(-2, 0)
        to = [2 * rank % n, (2 * rank + 1) % n]
        if to[0] > to[1]:
            blocks = blocks.flip(0)
        received, sent = ([ranks.count(i) for i in range(n)] for ranks in ([rank // 2, (n + rank) // 2], to))
        own = all_to_all_single_autograd(blocks.contiguous(), received, sent, self.mesh.get_group())
        return own.movedim(0, -2).flatten(-2)

    def of_heads(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's heads in a dimension of `x`, which all ranks have; its gradient is summed over the ranks."""
        if x.requires_grad:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
        return x.narrow(dim, self.heads.start, self.heads.stop - self.heads.start)

    def of_projected(self, y: torch.Tensor, sizes: list[int], num_heads: int) -> torch.Tensor:
        """Of `x_proj`'s output `[B, T, sum(sizes)]`, the low-rank step sizes and this rank's keys and queries."""
        b, *keys = y.split(sizes, -1)
        return torch.cat([b, *(self.of_heads(k.unflatten(-1, (num_heads, -1)), 2).flatten(-2) for k in keys)], -1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All channels, from this rank's `x` `[B, T, d / n]`."""
        return DTensor.from_local(x, self.mesh, [Shard(-1)], run_check=False).full_tensor()


def split(layer: Longhorn | Attention, mesh: DeviceMesh) -> None:
    """Install the hooks with which `layer`, whose parameters are DTensors, computes this rank's channels.

    Raises:
        ValueError: the mesh does not fit the layer.
    """
    n, rank = mesh.size(), mesh.get_local_rank()
    if isinstance(layer, Attention):
        if layer.num_kv_heads % n:
            raise ValueError(
                f'the tensor-parallel mesh must have a size that divides num_kv_heads = {layer.num_kv_heads} of layer '
                f'{layer.layer_idx}, got {n}'
            )
        return
    heads, channels = layer.num_heads, layer.intermediate_size
    if mesh.ndim != 1 or channels % n or (heads % n and n % heads):
        raise ValueError(
            f'the tensor-parallel mesh must have one dimension, of a size that divides the {channels} channels, and divides '
            f'num_heads = {heads} or is a multiple of it, got {mesh}'
        )
    first, count = rank * heads // n, max(1, heads // n)
    part = Part(mesh, slice(first, first + count))
    after(layer.in_proj, part.exchange)
    after(layer.x_proj, partial(part.of_projected, sizes=layer.x_sizes, num_heads=heads))
    if layer.scalar_beta:
        after(layer.beta_proj, partial(part.of_heads, dim=-1))
    if layer.v_proj is not None:
        layer.v_proj.register_forward_pre_hook(lambda module, args: part.gather(*args), prepend=True)
    use_local_parameters(layer)
    use_local_parameters(layer.conv1d)
    if layer.gate is not None:
        by_head = layer.gate.num_channels is None
        use_local_parameters(layer.gate, **({} if by_head else {'A_log': partial(part.of_heads, dim=0)}))
        if by_head:
            after(layer.gate, partial(part.of_heads, dim=2))
    layer.num_heads, layer.intermediate_size = count, channels // n
    layer.x_sizes = [layer.beta_rank, *[count * layer.state_size] * (len(layer.x_sizes) - 1)]


def after(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let `module` return `function` of its output."""
    module.register_forward_hook(lambda module, args, output: function(output))


def use_local_parameters(module: nn.Module, **changes: Callable) -> None:
    """Let `module`'s forward see this rank's parts of its own parameters as plain tensors, and what `changes` make of them."""
    whole: list[dict[str, Any]] = []

    # in `_parameters`, which is private: `setattr` takes no plain tensor for a parameter, and `torch.compile` of torch 2.11
    # does not see an attribute before it
    def enter(module: nn.Module, args: tuple) -> None:
        parameters: dict[str, Any] = module._parameters
        own = {name: x.to_local() for name, x in parameters.items() if isinstance(x, DTensor)}
        own |= {name: change(own.get(name, parameters[name])) for name, change in changes.items()}
        whole.append({name: parameters[name] for name in own})
        parameters.update(own)

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        module._parameters.update(whole.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


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
        use_local_parameters(super()._apply(module, device_mesh))
        return module


class SplitLayer(ShardParameters):
    """Split a Longhorn layer, or check that an attention layer can be, in PyTorch's plan and as a style of transformers."""

    def __init__(self) -> None:
        super().__init__(Shard(0))

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        return self.install_forward(super()._apply(module, device_mesh), device_mesh)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        split(module, mesh)
        return module


class TieWeights(ParallelStyle):
    """Ties weights again, which the styles replace separately in each module."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.tie_weights()
        return module


def tensor_parallel_styles(config: LonghornConfig) -> dict[str, str]:
    """transformers' tensor-parallel styles by module and parameter, for exactly those that the base model has."""
    kinds = set(config.layer_types)
    styles = {'embeddings': 'embedding_rowwise', 'layers.*.attn': 'longhorn'}
    if LINEAR in kinds:
        styles.update({
            'layers.*.attn.in_proj': 'colwise',
            # splits the first dimension; there is no style for convolutions
            'layers.*.attn.conv1d.weight': 'embedding_rowwise',
            'layers.*.attn.x_proj': 'rowwise',
            'layers.*.attn.D': 'colwise',
            'layers.*.attn.out_proj': 'rowwise',
        })
        if not config.scalar_beta:
            styles['layers.*.attn.beta_proj'] = 'colwise'
        if config.conv_bias:
            styles['layers.*.attn.conv1d.bias'] = 'embedding_rowwise'
        if config.gate is not None:
            styles['layers.*.attn.gate.down'] = 'rowwise'
        if config.gate == 'channel':
            styles.update({'layers.*.attn.gate.up': 'colwise', 'layers.*.attn.gate.dt_bias': 'embedding_rowwise'})
        if config.value_proj:
            styles['layers.*.attn.v_proj'] = 'colwise'
    if kinds - {LINEAR}:
        styles.update({f'layers.*.attn.{name}_proj': 'colwise' for name in 'qkv'})
        styles['layers.*.attn.o_proj'] = 'rowwise'
    if config.has_mlp:
        styles.update({f'layers.*.mlp.{name}_proj': 'colwise' for name in ('gate', 'up')})
        styles['layers.*.mlp.down_proj'] = 'rowwise'
    return styles


def styles_of_transformers(config: LonghornConfig) -> dict[str, str] | None:
    """`None` in versions of transformers whose tensor-parallel styles do not use DTensors."""
    return tensor_parallel_styles(config) if 'local_params' in ALL_PARALLEL_STYLES else None


def tensor_parallel_plan(model: Any) -> dict[str, ParallelStyle]:
    """A plan for `torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)`.

    All parameters become DTensors on the mesh, those of norms replicated, because optimizers and gradient clipping cannot mix
    DTensors and tensors.

    Raises:
        TypeError: the model is not one of Longhorn's own.
    """
    if not isinstance(getattr(model, 'config', None), LonghornConfig):
        raise TypeError(f"model must be one of Longhorn's models, with a LonghornConfig, got {type(model).__name__}")
    prefix = '' if model.base_model is model else f'{model.base_model_prefix}.'
    styles = {f'{prefix}{name}': style for name, style in tensor_parallel_styles(model.config).items()}
    styles.update(HEAD if isinstance(model, LonghornForCausalLM) else {})
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        generic = re.sub(r'\.\d+\.', '.*.', name)
        style, split_own = styles.get(generic), [x for x in own if f'{generic}.{x}' in styles]
        if style in STYLES:
            plan[name] = STYLES[style]()
        elif split_own and not isinstance(module, Longhorn):
            plan[name] = ShardParameters(Shard(0), whole=own.keys() - set(split_own))
        elif own and not isinstance(module, Longhorn):
            plan[name] = LocalParameters(Replicate())
    # the hooks of a layer come after those of the styles of its parts
    layers = {name: SplitLayer() for name, x in model.named_modules() if isinstance(x, (Longhorn, Attention))}
    return {**plan, **layers, '': TieWeights()}


ALL_PARALLEL_STYLES.register('longhorn', cast(Any, SplitLayer()))
