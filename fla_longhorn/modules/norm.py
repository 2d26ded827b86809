"""fla's RMSNorm and L2Norm: traceable, and under `torch.func`; on the CPU RMSNorm calls its compiled loop directly."""

from __future__ import annotations

import torch
from fla import modules

from fla_longhorn.modules.direct import get_parameter
from fla_longhorn.modules.loops import load_loops, widen
from fla_longhorn.ops.plain import is_plain, is_transformed


class RMSNorm(modules.RMSNorm):
    """:class:`fla.modules.RMSNorm`, in PyTorch under a compiler or `torch.func`."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x + residual`, of any shape, over the last dimension; with `prenorm` return that sum too."""
        weight, bias = get_parameter(self, 'weight'), get_parameter(self, 'bias')
        if residual is bias is None and not prenorm and is_plain(x, weight):
            loops = load_loops(x, weight)
            if loops is not None:
                return loops.rms_norm(x, weight, self.eps)
        if not (torch.compiler.is_compiling() or is_transformed()):
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
    """:class:`fla.modules.L2Norm`, in PyTorch under a compiler or `torch.func`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x / sqrt(|x|^2 + eps)` over the last dimension of `x`, of any shape; a row of zeros stays one."""
        if not (torch.compiler.is_compiling() or is_transformed()):
            return super().forward(x)
        rows = widen(x)
        y = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + self.eps)
        return y.to(x.dtype if self.output_dtype is None else self.output_dtype)
