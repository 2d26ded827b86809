"""Activation checkpointing in calls with a cache, which transformers' checkpointed blocks would drop.

Threads are counted, for samples drawn by several threads between steps of training: if the first to end gave the blocks their
checkpoints back, the others would lose their caches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock, get_ident
from typing import Any

import torch

_lock = Lock()
# the threads in calls without checkpoints, and the blocks that have them again after the last such call, by the model's id
_paused: dict[int, tuple[set[int], list[Any]]] = {}


# compilers trace neither a lock nor the thread
def _locked() -> AbstractContextManager:
    return nullcontext() if torch.compiler.is_compiling() else _lock


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else get_ident()


def pause_checkpointing(model: Any, cache: Any) -> None:
    """Disable the checkpoints of `model`'s blocks in a call with a cache or without gradients, as `generate` in training.

    Until :func:`resume_checkpointing` after the call; meanwhile calls in other threads run without checkpoints too.
    """
    if not model.training or (cache is None and torch.is_grad_enabled()):
        return
    with _locked():
        threads, blocks = _paused.setdefault(id(model), (set(), []))
        threads.add(_thread())
        for block in model.layers:
            if getattr(block, 'gradient_checkpointing', False):
                block.gradient_checkpointing = False
                blocks.append(block)


def resume_checkpointing(model: Any) -> None:
    """End this thread's call; nothing if it has not paused the checkpoints."""
    if not _paused:
        return
    with _locked():
        threads, blocks = _paused.get(id(model), (set(), []))
        threads.discard(_thread())
        if not threads:
            _paused.pop(id(model), None)
            for block in blocks:
                block.gradient_checkpointing = True
