"""fla's RMSNorm and L2Norm, in PyTorch too; a package's loop for the CPU is called directly."""

from __future__ import annotations

import torch
from fla import modules

from fla_longhorn.modules.bare import FORWARDS
from fla_longhorn.modules.dispatch import differentiable_once, in_pytorch, widen
from fla_longhorn.modules.recompute import keep_inputs
from fla_longhorn.ops import backends
from fla_longhorn.ops.plain import is_plain


class RMSNorm(modules.RMSNorm):
    """:class:`fla.modules.RMSNorm`, in PyTorch where fla's kernels cannot run."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x + residual`, of any shape, over the last dimension; with `prenorm` return that sum too."""
        if backends.loops is not None and residual is self.bias is None and not prenorm and is_plain(x, self.weight):
            loops = backends.loops.of_modules(x, self.weight)
            if loops is not None:
                return loops.rms_norm(x, self.weight, self.eps)
        if not in_pytorch(x):
            return differentiable_once(super().forward(x, residual, prenorm, residual_in_fp32), 'norm')
        y, stream = keep_inputs(self.normalise, x, residual, self.weight, self.bias, residual_in_fp32)
        return (y, stream) if prenorm else y

    def normalise(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
        residual_in_fp32: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In PyTorch: the normalised `x + residual`, and that sum."""
        rows, stream = widen(x), x
        if residual is not None:
            rows = rows + residual
            stream = rows.to(residual.dtype)
        elif residual_in_fp32:
            stream = rows.float()
        y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)
        if weight is not None:
            y = y * weight.to(rows.dtype)
        if bias is not None:
            y = y + bias.to(rows.dtype)
        return y.to(x.dtype), stream


class L2Norm(modules.L2Norm):
    """:class:`fla.modules.L2Norm`, in PyTorch where fla's kernels cannot run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x / sqrt(|x|^2 + eps)` over the last dimension of `x`, of any shape; a row of zeros stays one."""
        if not in_pytorch(x):
            return differentiable_once(super().forward(x), 'norm')
        rows = widen(x)
        y = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + self.eps)
        return y.to(x.dtype if self.output_dtype is None else self.output_dtype)


FORWARDS[L2Norm] = L2Norm.forward
