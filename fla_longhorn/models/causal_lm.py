"""Logits and loss of a causal language model: of Longhorn's own, and of fla's families with Longhorn as their mixer."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss

from fla_cpu.plain import is_transformed
from fla_longhorn.modules.bare import is_bare
from fla_longhorn.modules.losses import IGNORE_INDEX, cross_entropy, l2_warp, linear_cross_entropy


def compute_logits_and_loss(
    self: Any,
    hidden_states: torch.Tensor,
    labels: torch.LongTensor | None = None,
    logits_to_keep: int | torch.Tensor | None = 0,
    *,
    shift_labels: torch.LongTensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    fuse_linear_cross_entropy: bool | None = None,
    use_l2warp: bool | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """fla's method of this name, with the same losses in each setting of the config, of `criterion` and of the call.

    In three things it differs. The logits stay what they are: fla's default writes their gradient over them in backward. The
    head is called where it is wrapped, by an adapter, offloading or FSDP, where fla's fused linear loss
    reads the weight alone. And compilers and `torch.func` get losses in PyTorch.

    Returns:
        `(loss, logits)`: the loss `None` without labels, the logits `[B, T, V]` `None` where the loss is fused with the head.
    """
    config, head, criterion = self.config, self.lm_head, self.criterion
    fused_head = getattr(config, 'fuse_linear_cross_entropy', False)
    fused_head = fused_head if fuse_linear_cross_entropy is None else fuse_linear_cross_entropy
    use_l2warp = getattr(config, 'use_l2warp', False) if use_l2warp is None else use_l2warp
    targets = next_tokens(labels, shift_labels, getattr(criterion, 'ignore_index', IGNORE_INDEX))
    if targets is None:
        keep = slice(None) if logits_to_keep is None else logits_to_keep
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        return None, head(hidden_states[:, keep])

    targets = targets.to(hidden_states.device)
    reduction = 'mean' if num_items_in_batch is None else 'sum'
    logits = None
    if fused_head:
        loss = fused_linear_loss(criterion, reduction, use_l2warp, head, hidden_states, targets)
    else:
        logits = head(hidden_states)
        loss = plain_loss(criterion, reduction, config.fuse_cross_entropy)(logits.flatten(0, -2), targets.flatten())
        loss = l2_warp(loss, logits) if use_l2warp else loss
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss, logits


def fused_linear_loss(
    criterion: Any,
    reduction: str,
    use_l2warp: bool,
    head: Any,
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    if criterion is not None:
        return with_reduction(criterion, reduction)(hidden_states, targets, head.weight, head.bias)
    if not (torch.compiler.is_compiling() or is_transformed()) and is_bare(head, hidden_states.device):
        criterion = FusedLinearCrossEntropyLoss(use_l2warp=use_l2warp, reduction=reduction)
        return criterion(hidden_states, targets, head.weight, head.bias)
    return linear_cross_entropy(hidden_states, targets, head, reduction, use_l2warp)


def plain_loss(criterion: Any, reduction: str, fused: bool) -> Any:
    """A function of logits `[N, V]` and targets `[N]`."""
    if criterion is not None:
        return with_reduction(criterion, reduction)
    if not fused:
        return partial(F.cross_entropy, reduction=reduction)
    if torch.compiler.is_compiling() or is_transformed():
        return partial(cross_entropy, reduction=reduction)
    return FusedCrossEntropyLoss(inplace_backward=False, reduction=reduction)


def with_reduction(criterion: Any, reduction: str) -> Any:
    """A user's own criterion, which sums where the sum is divided by `num_items_in_batch`."""
    if reduction == 'mean':
        return criterion
    if not hasattr(criterion, 'reduction'):
        raise ValueError(f'criterion must have an attribute reduction with num_items_in_batch, got {criterion!r}')
    criterion = copy(criterion)
    criterion.reduction = reduction
    return criterion


def next_tokens(
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor | None:
    """What each position has to predict: `shift_labels` where they are given, else the label of the next position."""
    if shift_labels is not None or labels is None:
        return shift_labels
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)
