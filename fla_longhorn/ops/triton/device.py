"""What launch parameters take from the device."""

from __future__ import annotations

import re

import torch
import triton

# whether Triton's asynchronous copies serve: up to 3.6 it leaves out the fence between a copy and a warp group's product that
# reads it, and copies tiles with short rows in branches
ASYNC_COPIES = tuple(map(int, re.findall(r'\d+', triton.__version__)[:2])) >= (3, 7)
INTERPRETED_MULTIPROCESSORS = 4


def device_capability(device: torch.device) -> int:
    """CUDA's major compute capability of the current device; 0 for others, which are taken as having registers enough."""
    if device.type == 'cpu':
        return 9
    target = triton.runtime.driver.active.get_current_target()
    return target.arch // 10 if target.backend == 'cuda' else 0


def multiprocessor_count(device: torch.device) -> int:
    if device.type == 'cpu':
        return INTERPRETED_MULTIPROCESSORS
    from fla.utils import get_multiprocessor_count
    return get_multiprocessor_count(device.index)
