"""fla's RMSNorm and L2Norm: traceable, under `torch.func`, and without autograd's overhead for plain calls."""

from __future__ import annotations

import torch
from fla import modules
from fla.modules.norm import l2norm, layernorm

from fla_cpu.backend import load_loops, widen
from fla_cpu.plain import is_plain, is_transformed
from fla_longhorn.modules.direct import find_function, get_parameter


class RMSNorm(modules.RMSNorm):
    """:class:`fla.modules.RMSNorm`, in PyTorch under a compiler or `torch.func`."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x + residual`, of any shape, over the last dimension; with `prenorm` return that sum too."""
        weight, bias = get_parameter(self, 'weight'), get_parameter(self, 'bias')
        if is_plain(x, residual, weight, bias) and (residual is None or residual.shape == x.shape):
            return self._forward_plain(x, residual, weight, bias, prenorm, residual_in_fp32)
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

    def _forward_plain(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        prenorm: bool,
        residual_in_fp32: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        loops = load_loops(x, weight) if residual is bias is None and not prenorm else None
        if loops is not None:
            return loops.rms_norm(x, weight, self.eps)
        rows = x.reshape(-1, x.shape[-1])
        residual_dtype = torch.float32 if residual_in_fp32 else None
        y, _, _, stream = find_function(layernorm.layer_norm_fwd, x.device.type)(
            x=rows.contiguous(), weight=weight, bias=bias, eps=self.eps,
            residual=None if residual is None else residual.reshape_as(rows).contiguous(),
            residual_dtype=residual_dtype if residual is None else residual.dtype, is_rms_norm=True,
        )
        return (y.view(x.shape), stream.view(x.shape)) if prenorm else y.view(x.shape)


class L2Norm(modules.L2Norm):
    """:class:`fla.modules.L2Norm`, in PyTorch under a compiler or `torch.func`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x / sqrt(|x|^2 + eps)` over the last dimension of `x`, of any shape; a row of zeros stays one."""
        if is_plain(x):
            return find_function(l2norm.l2norm_fwd, x.device.type)(
                x=x.contiguous(), eps=self.eps, output_dtype=self.output_dtype,
            )[0]
        if not (torch.compiler.is_compiling() or is_transformed()):
            return super().forward(x)
        rows = widen(x)
        y = rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + self.eps)
        return y.to(x.dtype if self.output_dtype is None else self.output_dtype)
