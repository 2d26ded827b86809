"""What launch parameters may ask of the device."""

from __future__ import annotations

import torch
import triton


def device_capability(device: torch.device) -> int:
    """CUDA's major compute capability of the current device; others are taken as having registers enough."""
    if device.type == 'cpu':
        return 9
    target = triton.runtime.driver.active.get_current_target()
    return target.arch // 10 if target.backend == 'cuda' else 9
