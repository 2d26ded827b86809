"""Properties of the device that launch parameters depend on."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton

# whether Triton's asynchronous copies are usable: up to 3.6 there is no fence between a copy and a warp group's product that
# reads it, and tiles with short rows are copied in branches
ASYNC_COPIES = tuple(map(int, re.findall(r'\d+', triton.__version__)[:2])) >= (3, 7)
INTERPRETED_MULTIPROCESSORS = 4


def device_capability(device: torch.device) -> int:
    """CUDA's major compute capability of the current device; 0 for others, which are assumed to have enough registers."""
    if device.type == 'cpu':
        return 9
    target = triton.runtime.driver.active.get_current_target()
    return target.arch // 10 if target.backend == 'cuda' else 0


def multiprocessor_count(device: torch.device) -> int:
    return INTERPRETED_MULTIPROCESSORS if device.type == 'cpu' else _multiprocessor_count(device.index)


@cache
def _multiprocessor_count(index: int) -> int:
    return triton.runtime.driver.active.utils.get_device_properties(index)['multiprocessor_count']


def custom_device_ctx(device: torch.device) -> AbstractContextManager:
    """Make the tensors' device PyTorch's current one, for launches."""
    return nullcontext() if device.index is None else torch.get_device_module(device).device(device.index)
