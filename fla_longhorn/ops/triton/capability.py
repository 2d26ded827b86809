"""What launch parameters may ask of the device."""

from __future__ import annotations

import re

import torch
import triton

# up to 3.6, Triton leaves out the fence between a copy to shared memory that it starts ahead and a warp group's product that
# reads it, and copies what is shorter than a warp's rows in branches
FENCES_COPIES = COPIES_SHORT_ROWS = tuple(map(int, re.findall(r'\d+', triton.__version__)[:2])) >= (3, 7)


def device_capability(device: torch.device) -> int:
    """CUDA's major compute capability of the current device; others are taken as having registers enough."""
    if device.type == 'cpu':
        return 9
    target = triton.runtime.driver.active.get_current_target()
    return target.arch // 10 if target.backend == 'cuda' else 9
