"""fla's gated MLP: traceable, and with `down_proj` called as a module if a library wraps it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fla.modules import mlp
from fla.modules.activations import ops

from fla_longhorn.modules.bare import is_bare
from fla_longhorn.modules.dispatch import differentiable_once, in_pytorch, widen
from fla_longhorn.modules.recompute import keep_inputs


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`silu(x) * y`, computed in float32."""
    return (F.silu(widen(x)) * widen(y)).to(x.dtype)


def powglu(x: torch.Tensor, y: torch.Tensor, power: float) -> torch.Tensor:
    """`sigmoid(x) * x^p * y` with `p = power / (sqrt(x) + 1)` where x > 0 and p = 1 elsewhere, computed in float32."""
    wide = widen(x)
    positive = wide > 0
    # root and logarithm of other values would give NaN, in backward too
    base = torch.where(positive, wide, 1.0)
    gate = torch.where(positive, torch.exp(power / (base.sqrt() + 1) * base.log()), wide) * torch.sigmoid(wide)
    return (gate * widen(y)).to(x.dtype)


class SwiGLULinear(mlp.SwiGLULinear):
    """:class:`fla.modules.mlp.SwiGLULinear`, in PyTorch where fla's kernels cannot run."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`(silu(x) * y) @ weight.T + bias`."""
        if not in_pytorch(x):
            return differentiable_once(super().forward(x, y, weight, bias), 'activation')
        return keep_inputs(lambda x, y, weight, bias: F.linear(swiglu(x, y), weight, bias), x, y, weight, bias)


class GatedMLP(mlp.GatedMLP):
    """:class:`fla.modules.GatedMLP`, in PyTorch where fla's kernels cannot run.

    fla's fused activation uses the weight of `down_proj`, which saves memory for `[B, T, intermediate_size]` in training. If
    `down_proj` is not bare (:func:`fla_longhorn.modules.bare.is_bare`), it is called instead.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if hasattr(self, 'swiglu_linear'):
            self.swiglu_linear = SwiGLULinear()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`down_proj(act(gate_proj(x)) * up_proj(x))`."""
        fused = self.fuse_swiglu and is_bare(self.down_proj, x.device)
        unfused = in_pytorch(x)
        if not unfused and (fused or not self.fuse_swiglu):
            return differentiable_once(super().forward(x, **kwargs), 'activation')
        gate, y = self.gate_proj(x), self.up_proj(x)
        if self.hidden_act == 'powlu':
            power = self.powglu_power
            return self.down_proj(
                keep_inputs(powglu, gate, y, power) if unfused
                else differentiable_once(ops.powglu(gate, y, power), 'activation')
            )
        if fused:
            return self.swiglu_linear(gate, y, self.down_proj.weight, self.down_proj.bias)
        return self.down_proj(
            keep_inputs(swiglu, gate, y) if unfused else differentiable_once(ops.swiglu(gate, y), 'activation')
        )
