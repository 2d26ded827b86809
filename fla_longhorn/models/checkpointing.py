"""Activation checkpointing beside a cache, which transformers' blocks would otherwise drop, and with it the tokens before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def pause_checkpointing(model: Any, cache: Any) -> list[Any]:
    """Switch off the checkpoints of `model`'s blocks in a call that continues `cache` or needs no gradient.

    So `generate` between two steps of training is right. Blocks keep their checkpoints in a call that is given no cache and
    may be followed by a backward.

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
