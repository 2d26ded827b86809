"""The losses of fla's language models in PyTorch, for compilers, `torch.func` and heads that must be called as modules.

`cross_entropy` is :class:`fla.modules.FusedCrossEntropyLoss`, `linear_cross_entropy` is
:class:`fla.modules.FusedLinearCrossEntropyLoss` and `l2_warp` is `fla.modules.l2warp.l2_warp`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fla_longhorn.modules.dispatch import widen
from fla_longhorn.ops.plain import is_transformed

IGNORE_INDEX = -100
L2_PENALTY_FACTOR = 1e-4
# the rows are split into so many chunks, as in fla; only one chunk's logits are in memory
NUM_CHUNKS = 8


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str = 'mean') -> torch.Tensor:
    """Cross entropy of logits `[N, V]` and targets `[N]`, computed in float32; a scalar, NaN for a mean over no targets."""
    return F.cross_entropy(widen(logits), target, ignore_index=IGNORE_INDEX, reduction=reduction)


def l2_warp(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`loss`, whose backward adds `1e-4 / N * max` to the gradient of each row's largest of the `logits` `[..., V]`."""
    rows = logits.flatten(0, -2)
    return loss + _without_value(_l2_penalty(rows).sum() / rows.shape[0])


def _l2_penalty(logits: torch.Tensor) -> torch.Tensor:
    return 0.5 * L2_PENALTY_FACTOR * widen(logits.max(-1).values).square()


def _without_value(x: torch.Tensor) -> torch.Tensor:
    return x - x.detach()


def linear_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], reduction: str = 'mean',
    use_l2warp: bool = False,
) -> torch.Tensor:
    """Cross entropy of `head(x)` and `target`, for `x` `[..., D]` and `target` `[...]`; a float32 scalar.

    A mean over no targets is 0. Only one chunk's logits are in memory at a time; backward recomputes them. The head, a linear
    layer, is called once per chunk, so its hooks and adapters run.
    """
    x, target = x.flatten(0, -2), target.flatten()
    N, D = x.shape
    # a fixed number of equal chunks, the last padded, so that one compiled graph serves any N
    size = (N + NUM_CHUNKS - 1) // NUM_CHUNKS
    rows = F.pad(x, (0, 0, 0, NUM_CHUNKS - 1))[:NUM_CHUNKS * size].view(NUM_CHUNKS, size, D)
    classes = F.pad(target, (0, NUM_CHUNKS - 1), value=IGNORE_INDEX)[:NUM_CHUNKS * size].view(NUM_CHUNKS, size)
    real = (torch.arange(NUM_CHUNKS * size, device=x.device) < N).view(NUM_CHUNKS, size)

    parts = []
    for i in range(NUM_CHUNKS):
        inputs = rows[i], classes[i], real[i], head, use_l2warp
        # checkpoints do not work in transforms of torch.func
        parts.append(_chunk_loss(*inputs) if is_transformed() else checkpoint(_chunk_loss, *inputs, use_reentrant=False))
    losses, penalties = zip(*parts, strict=True)
    loss = sum(losses)
    if reduction == 'mean':
        loss = loss / (target != IGNORE_INDEX).sum().clamp_min(1)
    return loss + _without_value(sum(penalties) / N) if use_l2warp else loss


def _chunk_loss(
    x: torch.Tensor, target: torch.Tensor, real: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], use_l2warp: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(x)
    loss = cross_entropy(logits, target, reduction='sum')
    return loss, torch.where(real, _l2_penalty(logits), 0).sum() if use_l2warp else torch.zeros_like(loss)
