"""What launch parameters may ask of the device."""

from __future__ import annotations

import re

import torch
import triton

# whether Triton's asynchronous copies serve: up to 3.6 it leaves out the fence between a copy and a warp group's product that
# reads it, and copies tiles with short rows in branches
ASYNC_COPIES = tuple(map(int, re.findall(r'\d+', triton.__version__)[:2])) >= (3, 7)


def device_capability(device: torch.device) -> int:
    """CUDA's major compute capability of the current device; 0 for others, which are taken as having registers enough."""
    if device.type == 'cpu':
        return 9
    target = triton.runtime.driver.active.get_current_target()
    return target.arch // 10 if target.backend == 'cuda' else 0
