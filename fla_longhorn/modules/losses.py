"""The losses of fla's language models in plain PyTorch, for a trace.

`cross_entropy` is :class:`fla.modules.FusedCrossEntropyLoss`, `linear_cross_entropy` is
:class:`fla.modules.FusedLinearCrossEntropyLoss` and `l2_warp` is `fla.modules.l2warp.l2_warp`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fla_longhorn.backends.cpu import widen

IGNORE_INDEX = -100
L2_PENALTY_FACTOR = 1e-4
# of the rows whose logits exist at a time, fla's default
NUM_CHUNKS = 8


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str = 'mean') -> torch.Tensor:
    """Cross entropy of logits `[N, V]` and targets `[N]`, computed in float32; a scalar, NaN for a mean of no targets."""
    return F.cross_entropy(widen(logits), target, ignore_index=IGNORE_INDEX, reduction=reduction)


def l2_warp(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`loss` as it is, with the gradient `1e-4 / N * max` added at the largest of each row of `logits` `[..., V]`."""
    return loss + _without_value(_l2_penalty(logits) / logits[..., 0].numel())


def _l2_penalty(logits: torch.Tensor) -> torch.Tensor:
    return 0.5 * L2_PENALTY_FACTOR * widen(logits.max(-1).values).square().sum()


def _without_value(x: torch.Tensor) -> torch.Tensor:
    return x - x.detach()


def linear_cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    reduction: str = 'mean',
    use_l2warp: bool = False,
) -> torch.Tensor:
    """Cross entropy of `x @ weight.T + bias` and `target` `[..., T]`, a float32 scalar; 0 for a mean of no targets.

    The logits of one of a few chunks of rows exist at a time, in backward again: they are computed a second time there.
    """
    x, target = x.flatten(0, -2), target.flatten()
    loss, penalty = x.new_zeros((), dtype=widen(x[:0]).dtype), 0.0
    for rows, classes in zip(x.chunk(NUM_CHUNKS), target.chunk(NUM_CHUNKS), strict=True):
        part, part_penalty = checkpoint(_chunk_loss, rows, classes, weight, bias, use_l2warp, use_reentrant=False)
        loss, penalty = loss + part, penalty + part_penalty
    if reduction == 'mean':
        loss = loss / (target != IGNORE_INDEX).sum().clamp_min(1)
    return loss + _without_value(penalty / len(x)) if use_l2warp else loss


def _chunk_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    use_l2warp: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(x, weight, bias)
    loss = cross_entropy(logits, target, reduction='sum')
    return loss, _l2_penalty(logits) if use_l2warp else torch.zeros_like(loss)
