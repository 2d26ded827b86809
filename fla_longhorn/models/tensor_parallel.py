"""A model's tensor-parallel plan in PyTorch's styles, from the plan of its config in transformers' names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fla_longhorn.layers import Longhorn
from fla_longhorn.models.longhorn.configuration_longhorn import LonghornConfig, tensor_parallel_styles
from fla_longhorn.modules.tensor_parallel import LocalParameters, ShardParameters

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    'colwise': ColwiseParallel,
    'colwise_gather_output': lambda: ColwiseParallel(output_layouts=Replicate()),
    'rowwise': RowwiseParallel,
    'embedding_rowwise': lambda: RowwiseParallel(input_layouts=Replicate()),
}


class TieWeights(ParallelStyle):
    """Ties weights again, which the styles replace separately in each module."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.tie_weights()
        return module


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
    styles.update(type(model)._tp_plan or {})
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        generic = re.sub(r'\.\d+\.', '.*.', name)
        style = styles.get(generic)
        if style == 'local_params':
            plan[name] = LocalParameters(Shard(0), whole=[x for x in own if f'{generic}.{x}' not in styles])
        elif style is not None:
            plan[name] = STYLES[style]()
        elif isinstance(module, Longhorn):
            plan[name] = ShardParameters(Shard(0))
        elif own:
            plan[name] = LocalParameters(Replicate())
    return {**plan, '': TieWeights()}
