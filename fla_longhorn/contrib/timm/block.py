"""A block of Vision Longhorn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from timm.layers import DropPath

from fla_longhorn.contrib.timm.mixer import BidirectionalLonghorn
from fla_longhorn.contrib.timm.packing import Packing
from fla_longhorn.contrib.timm.tracing import RMSNorm


class Block(nn.Module):
    """`x + mixer(norm(x))` with `x` in float32; there is no MLP, as in Vision Mamba."""

    def __init__(self, dim: int, drop_path: float = 0., device=None, dtype=None, **mixer: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps=1e-5, device=device, dtype=dtype)
        self.mixer = BidirectionalLonghorn(dim, device=device, dtype=dtype, **mixer)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        y = self.mixer(self.norm(x).to(self.mixer.in_proj.weight.dtype), packing)
        if packing is None:
            return x + self.drop_path(y)
        # drop images, not the row that holds all of them
        kept = self.drop_path(y.new_ones(packing.lengths.shape[0], 1))
        # without output_size, PyTorch reads the sum of the lengths on the host
        return x + y * kept.repeat_interleave(packing.lengths, 0, output_size=y.shape[1])
