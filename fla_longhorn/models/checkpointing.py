"""Activation checkpointing in calls with a cache, which transformers' checkpointed blocks would drop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def pause_checkpointing(model: Any, cache: Any) -> list[Any]:
    """Disable the checkpoints of `model`'s blocks in a call with a cache or without gradients, as `generate` in training.

    Returns:
        The blocks, for :func:`resume_checkpointing` after the call.
    """
    if not model.training or (cache is None and torch.is_grad_enabled()):
        return []
    blocks = [block for block in model.layers if getattr(block, 'gradient_checkpointing', False)]
    for block in blocks:
        block.gradient_checkpointing = False
    return blocks


def resume_checkpointing(blocks: Iterable[Any]) -> None:
    for block in blocks:
        block.gradient_checkpointing = True
