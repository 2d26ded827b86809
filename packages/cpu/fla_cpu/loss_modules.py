"""Losses of fla that are not in its registry.

`FusedCrossEntropyLoss.forward` raises an error for CPU tensors before it looks there. `L2Wrap` runs anywhere; a second
derivative of it would be without its penalty.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from fla.modules.fused_cross_entropy import ops
from fla.modules.l2warp import L2Wrap

from fla_cpu.backend import CPUBackend, differentiable_once, replaces

_forward = ops.FusedCrossEntropyLoss.forward
_penalise = L2Wrap.backward
_penalise_once = differentiable_once('penalty of logits (l2_warp)', 'leave it out by use_l2warp=False')(_penalise)


@replaces(ops.FusedCrossEntropyLoss, 'forward')
@wraps(_forward)
def forward(
    self: ops.FusedCrossEntropyLoss,
    input: torch.Tensor,
    target: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of logits `[N, V]` and targets `[N]`: a float32 scalar, or `[N]` with `reduction='none'`."""
    if input.device.type != 'cpu' or not CPUBackend().is_enabled():
        return _forward(self, input, target)
    losses = ops.cross_entropy_loss(
        logits=input,
        target=target,
        label_smoothing=self.label_smoothing,
        logit_scale=self.logit_scale,
        lse_square_scale=self.lse_square_scale,
        logit_softcapping=self.logit_softcapping,
        ignore_index=self.ignore_index,
        inplace_backward=self.inplace_backward,
        process_group=self.process_group,
    )
    if self.reduction != 'none':
        losses = tuple(x.sum() for x in losses)
    if self.reduction == 'mean':
        count = (target != self.ignore_index).sum()
        losses = tuple(x / count for x in losses)
    return losses if self.return_z_loss else losses[0]


@replaces(L2Wrap, 'backward')
@wraps(_penalise)
def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    on_cpu = dloss.device.type == 'cpu' and CPUBackend().is_enabled()
    return (_penalise_once if on_cpu else _penalise)(ctx, dloss)
