"""fla's RMSNorm and L2Norm, traceable."""

from __future__ import annotations

import torch
from fla import modules

from fla_longhorn.cpu.backend import widen


class RMSNorm(modules.RMSNorm):
    """:class:`fla.modules.RMSNorm`, in PyTorch while a compiler traces it."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x + residual`, of any shape, over the last dimension; with `prenorm` return that sum too."""
        if not torch.compiler.is_compiling():
            return super().forward(x, residual, prenorm, residual_in_fp32)
        rows, stream = widen(x), x
        if residual is not None:
            rows = rows + residual
            stream = rows.to(residual.dtype)
        elif residual_in_fp32:
            stream = rows.float()
        y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.to(rows.dtype)
        if self.bias is not None:
            y = y + self.bias.to(rows.dtype)
        y = y.to(x.dtype)
        return (y, stream) if prenorm else y


class L2Norm(modules.L2Norm):
    """:class:`fla.modules.L2Norm`, in PyTorch while a compiler traces it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x / sqrt(|x|^2 + eps)` over the last dimension of `x`, of any shape; a row of zeros stays one."""
        if not torch.compiler.is_compiling():
            return super().forward(x)
        rows = widen(x)
        y = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + self.eps)
        return y.to(x.dtype if self.output_dtype is None else self.output_dtype)
