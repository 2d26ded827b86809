"""Logits and loss of causal language models: Longhorn's own, and fla's families with Longhorn as their mixer.

fla's losses are here in PyTorch too, for compilers, `torch.func` and heads that must be called as modules: `cross_entropy` is
:class:`fla.modules.FusedCrossEntropyLoss`, `linear_cross_entropy` is :class:`fla.modules.FusedLinearCrossEntropyLoss` and
`l2_warp` is `fla.modules.l2warp.l2_warp`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from torch.utils.checkpoint import checkpoint

from fla_longhorn.modules.bare import is_bare
from fla_longhorn.modules.cache import rename_cache
from fla_longhorn.modules.dispatch import differentiable_once, in_pytorch, widen
from fla_longhorn.modules.recompute import keep_inputs
from fla_longhorn.ops.plain import is_transformed

IGNORE_INDEX = -100
L2_PENALTY_FACTOR = 1e-4
# the rows are split into so many chunks, as in fla; only one chunk's logits are in memory
NUM_CHUNKS = 8


@dataclass
class ShiftedLabels:
    """`shift_labels` as the argument `labels` of fla's `forward`, which passes no other name on to the loss."""

    labels: torch.Tensor


def with_shift_labels(forward: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """fla's `forward` of a causal language model, with the cache by either name.

    It takes `shift_labels` `[B, T]` too, already shifted, which win over `labels`.
    """
    kwargs = rename_cache(kwargs)
    if (shift_labels := kwargs.pop('shift_labels', None)) is not None:
        kwargs['labels'] = ShiftedLabels(shift_labels)
    return forward(self, *args, **kwargs)


def compute_logits_and_loss(
    self: Any,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | ShiftedLabels | None = None,
    logits_to_keep: int | torch.Tensor | None = 0,
    *,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    fuse_linear_cross_entropy: bool | None = None,
    use_l2warp: bool | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """fla's method of this name, with the same losses for every setting of the config, `criterion` and the call.

    It differs in three things. Backward does not overwrite the logits, as fla's default does. A wrapped head (adapters,
    offloading, FSDP) is called as a module, where fla's fused linear loss reads its weight. Compilers and `torch.func` get
    losses in PyTorch.

    Returns:
        `(loss, logits)`: the loss is `None` without labels, the logits `[B, T, V]` if the loss is fused with the head.
    """
    config, head, criterion = self.config, self.lm_head, self.criterion
    if fuse_linear_cross_entropy is None:
        fuse_linear_cross_entropy = getattr(config, 'fuse_linear_cross_entropy', False)
    use_l2warp = getattr(config, 'use_l2warp', False) if use_l2warp is None else use_l2warp
    targets = shift_labels
    if isinstance(labels, ShiftedLabels):
        targets = labels.labels
    elif targets is None and labels is not None:
        targets = F.pad(labels[..., 1:], (0, 1), value=getattr(criterion, 'ignore_index', IGNORE_INDEX))
    if targets is None:
        keep = slice(None) if logits_to_keep is None else logits_to_keep
        keep = slice(-keep, None) if isinstance(keep, int) else keep
        return None, head(hidden_states[:, keep])

    B, T = hidden_states.shape[:2]
    # the rows are flattened, so another shape would compare them with others
    if targets.shape[-1] != T or targets.numel() != B * T:
        name = 'labels' if isinstance(labels, torch.Tensor) and shift_labels is None else 'shift_labels'
        raise ValueError(f'{name} must have shape [B, T] = [{B}, {T}], got {list(targets.shape)}')
    targets = targets.to(hidden_states.device)
    reduction = 'mean' if num_items_in_batch is None else 'sum'
    logits = None
    if fuse_linear_cross_entropy:
        loss = fused_linear_loss(criterion, reduction, use_l2warp, head, hidden_states, targets)
    else:
        logits = head(hidden_states)
        loss = plain_loss(criterion, reduction, config.fuse_cross_entropy, logits)(logits.flatten(0, -2), targets.flatten())
        loss = l2_warp(loss, logits) if use_l2warp else loss
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        # if there are no items, the gradients are 0 rather than 0 / 0
        loss = loss / (num_items_in_batch + (num_items_in_batch == 0))
    if use_l2warp:
        # the penalty is of all rows, and alone it would train on a batch without a target
        loss = loss * (targets != getattr(criterion, 'ignore_index', IGNORE_INDEX)).any()
    return loss, logits


def fused_linear_loss(
    criterion: Any, reduction: str, use_l2warp: bool, head: Any, hidden_states: torch.Tensor, targets: torch.Tensor,
) -> torch.Tensor:
    if criterion is not None:
        return with_reduction(criterion, reduction)(hidden_states, targets, head.weight, head.bias)
    if not in_pytorch(hidden_states) and is_bare(head, hidden_states.device):
        criterion = FusedLinearCrossEntropyLoss(use_l2warp=use_l2warp, reduction=reduction)
        return differentiable_once(criterion(hidden_states, targets, head.weight, head.bias), 'linear cross entropy')
    return linear_cross_entropy(hidden_states, targets, head, reduction, use_l2warp)


def plain_loss(criterion: Any, reduction: str, fused: bool, logits: torch.Tensor) -> Any:
    """A function of logits `[N, V]` and targets `[N]`."""
    if criterion is not None:
        return with_reduction(criterion, reduction)
    if not fused:
        return partial(F.cross_entropy, reduction=reduction)
    if in_pytorch(logits):
        return partial(keep_inputs, partial(cross_entropy, reduction=reduction))
    criterion = FusedCrossEntropyLoss(inplace_backward=False, reduction=reduction)
    return lambda logits, targets: differentiable_once(criterion(logits, targets), 'cross entropy')


def with_reduction(criterion: Any, reduction: str) -> Any:
    """A user's criterion, copied with reduction `'sum'` where the sum is divided by `num_items_in_batch`."""
    if reduction == 'mean':
        return criterion
    if not hasattr(criterion, 'reduction'):
        raise ValueError(f'criterion must have an attribute reduction with num_items_in_batch, got {criterion!r}')
    criterion = copy(criterion)
    criterion.reduction = reduction
    return criterion


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
