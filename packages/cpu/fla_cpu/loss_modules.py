"""`FusedCrossEntropyLoss` on the CPU: its `forward` raises an error for CPU tensors before it looks into fla's registry."""

from __future__ import annotations

from functools import wraps

import torch
from fla.modules.fused_cross_entropy import ops

from fla_cpu.backend import CPUBackend, replaces

_forward = ops.FusedCrossEntropyLoss.forward


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
