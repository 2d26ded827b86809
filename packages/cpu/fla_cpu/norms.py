"""Layer, RMS, group, gated and L2 normalisation on the CPU.

Registered: `layer_norm_fwd`, `layer_norm_bwd` (behind fla's LayerNorm, RMSNorm, GroupNorm and their `*Linear` forms),
`layer_norm_gated_fwd`, `layer_norm_gated_bwd` (behind the `Fused*NormGated` modules), `l2norm_fwd`, `l2norm_bwd`.
Rows are `[T, D]`; with G groups the groups of a token are consecutive rows, so row t belongs to group `t % G`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.modules.norm import fused_norm_gate, l2norm, layernorm

from fla_cpu.backend import (
    LOOP_DTYPES,
    differentiable_once,
    has_memory,
    implements,
    load_loops,
    require,
    widen,
    widen_for_loops,
)

of_norm = differentiable_once('norm', 'compute it in PyTorch, which is fuse_norm=False in a model')


def _cast(param: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if param is None else param.to(dtype)


def _affine(rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, num_groups: int) -> torch.Tensor:
    """Scale and shift normalised `rows` `[T, D]` in place with `weight` and `bias` `[G * D]`."""
    grouped = rows.view(-1, num_groups, rows.shape[-1])
    if weight is not None:
        grouped.mul_(weight.view(num_groups, -1))
    if bias is not None:
        grouped.add_(bias.view(num_groups, -1))
    return rows


def _normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool,
    num_groups: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the normalised rows `[T, D]`, their means `[T]` (`None` for RMS) and inverse deviations `[T]`.

    The rows are in `dtype`, or that of `widen(x)`.
    """
    wide_dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    dtype = wide_dtype if dtype is None else dtype
    if is_rms_norm and bias is None and num_groups == 1 and dtype in LOOP_DTYPES:
        near = widen_for_loops(x)
        loops = load_loops(near, weight) if has_memory(near, weight) else None
        if loops is not None:
            rstd = near.new_empty(len(near), dtype=torch.float32)
            return loops.rms_norm(near, weight, eps, dtype, rstd), None, rstd
    y, mean, rstd = _normalise_wide(widen(x), _cast(weight, wide_dtype), _cast(bias, wide_dtype), eps, is_rms_norm, num_groups)
    return y.to(dtype), mean, rstd


def _normalise_wide(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    D = x.shape[-1]
    if is_rms_norm:
        rstd = torch.linalg.vector_norm(x, dim=-1).square_().div_(D).add_(eps).rsqrt_()
        return _affine(x * rstd[:, None], weight, bias, num_groups), None, rstd
    if num_groups == 1:
        y, mean, rstd = torch.native_layer_norm(x, (D,), weight, bias, eps)
    else:
        y, mean, rstd = torch.native_layer_norm(x, (D,), None, None, eps)
        _affine(y, weight, bias, num_groups)
    return y, mean.view(-1), rstd.view(-1)


def _standardise(x: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor) -> torch.Tensor:
    return x * rstd[:, None] if mean is None else (x - mean[:, None]).mul_(rstd[:, None])


def _normalise_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return `dx` `[T, D]`, `dweight` and `dbias` `[G * D]` (`None` where there is no such parameter)."""
    T, D = x.shape
    weight, bias = _cast(weight, x.dtype), _cast(bias, x.dtype)
    if num_groups > 1:
        dweight = dbias = None
        if bias is not None:
            dbias = dy.view(-1, num_groups * D).sum(0)
        if weight is not None:
            dweight = _standardise(x, mean, rstd).mul_(dy).view(-1, num_groups * D).sum(0)
            dy = _affine(dy.clone(), weight, None, num_groups)
        return _normalise_backward(dy, x, None, None, mean, rstd, 1)[0], dweight, dbias

    center = torch.zeros_like(rstd) if mean is None else mean
    mask = [True, weight is not None, bias is not None]
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy, x, (D,), center.view(T, 1), rstd.view(T, 1), weight, bias, mask,
    )
    if mean is None:
        # it also propagates through the mean; RMSNorm has none, so that term is added back
        mean_dy = dy.mean(-1) if weight is None else torch.mv(dy, weight).div_(D)
        dx.add_(mean_dy.mul_(rstd)[:, None])
    return dx, dweight, dbias


def _add_residual(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    residual_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows to normalise, and the residual stream as the next layer gets it (`x` itself if unchanged)."""
    if residual is not None:
        rows = widen(x) + residual
        return rows, rows.to(residual.dtype)
    if residual_dtype is not None and residual_dtype != x.dtype:
        return x, x.to(residual_dtype)
    return x, x


def _as_parameter(gradient: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter)


def _input_gradients(
    dx: torch.Tensor,
    dresidual: torch.Tensor | None,
    x: torch.Tensor,
    has_residual: bool,
    x_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the input and of the residual, one tensor where their dtypes agree."""
    if dresidual is not None:
        dx = dx.add_(dresidual)
    dresidual_in = dx.to(x.dtype) if has_residual else None
    return dx.to(x.dtype if x_dtype is None else x_dtype), dresidual_in


@implements(layernorm.layer_norm_fwd)
def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Normalise `x + residual` `[T, D]`; return the output, means, inverse deviations and the residual stream."""
    rows, residual_out = _add_residual(x, residual, residual_dtype)
    dtype = x.dtype if out_dtype is None else out_dtype
    y, mean, rstd = _normalise(rows, weight, bias, eps, is_rms_norm, num_groups, dtype)
    return y, mean, rstd, residual_out


@implements(layernorm.layer_norm_bwd)
@of_norm
def layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    dres: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor | None, ...]:
    """Return `dx`, `dweight`, `dbias`, the residual's gradient and, with `recompute_output`, the forward output."""
    rows, mean, rstd = widen(x), None if is_rms_norm else mean, require('rstd', rstd)
    dx, dweight, dbias = _normalise_backward(widen(dy), rows, weight, bias, mean, rstd, num_groups)
    dx, dresidual_in = _input_gradients(dx, dres, x, has_residual, x_dtype)
    dweight, dbias = _as_parameter(dweight, weight), _as_parameter(dbias, bias)
    if not recompute_output:
        return dx, dweight, dbias, dresidual_in
    y = _affine(_standardise(rows, mean, rstd), weight, bias, num_groups)
    return dx, dweight, dbias, dresidual_in, y.to(dy.dtype)


def _gate(g: torch.Tensor, activation: str) -> torch.Tensor:
    if activation in ('swish', 'silu'):
        return F.silu(g)
    if activation == 'sigmoid':
        return torch.sigmoid(g)
    raise ValueError(f"activation must be 'swish', 'silu' or 'sigmoid', got {activation!r}")


def _gate_backward(dgate: torch.Tensor, g: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == 'sigmoid':
        return torch.ops.aten.sigmoid_backward(dgate, gate)
    return torch.ops.aten.silu_backward(dgate, g)


@implements(fused_norm_gate.layer_norm_gated_fwd)
def layer_norm_gated_fwd(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = 'swish',
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`norm(x + residual) * activation(g)` of rows `[T, D]`, with the same return values as `layer_norm_fwd`."""
    rows, residual_out = _add_residual(x, residual, residual_dtype)
    y, mean, rstd = _normalise(rows, weight, bias, eps, is_rms_norm, 1)
    y.mul_(_gate(widen(g), activation))
    return y.to(x.dtype if out_dtype is None else out_dtype), mean, rstd, residual_out


@implements(fused_norm_gate.layer_norm_gated_bwd)
@of_norm
def layer_norm_gated_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = 'swish',
    eps: float = 1e-5,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    dresidual: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return `dx`, `dg`, `dweight`, `dbias`, the residual's gradient and, with `recompute_output`, the forward output."""
    rows, mean, rstd = widen(x), None if is_rms_norm else mean, require('rstd', rstd)
    wide_dy, wide_g = widen(dy), widen(g)
    gate = _gate(wide_g, activation)
    y = _affine(_standardise(rows, mean, rstd), weight, bias, 1)
    dg = _gate_backward(wide_dy * y, wide_g, gate, activation)
    dx, dweight, dbias = _normalise_backward(wide_dy * gate, rows, weight, bias, mean, rstd, 1)
    dx, dresidual_in = _input_gradients(dx, dresidual, x, has_residual, x_dtype)
    dg = dg.to(g.dtype if x_dtype is None else x_dtype)
    dweight, dbias = _as_parameter(dweight, weight), _as_parameter(dbias, bias)
    if not recompute_output:
        return dx, dg, dweight, dbias, dresidual_in
    return dx, dg, dweight, dbias, dresidual_in, y.mul_(gate).to(dy.dtype)


@implements(l2norm.l2norm_fwd)
def l2norm_fwd(
    x: torch.Tensor,
    eps: float = 1e-6,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`y = x / sqrt(|x|^2 + eps)` over the last dimension `[..., D]`; return `y` and the factors `[...]`."""
    wide = widen(x)
    rstd = torch.linalg.vector_norm(wide, dim=-1).square_().add_(eps).rsqrt_()
    return (wide * rstd[..., None]).to(x.dtype if output_dtype is None else output_dtype), rstd


@implements(l2norm.l2norm_bwd)
@differentiable_once('L2 norm', 'call torch.nn.functional.normalize')
def l2norm_bwd(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`dx = rstd * (dy - (dy . y) y)`, `[..., D]` in the dtype of `y`."""
    wide_y, wide_dy = widen(y), widen(dy)
    dx = wide_dy.addcmul((wide_dy * wide_y).sum(-1, keepdim=True), wide_y, value=-1)
    return dx.mul_(rstd[..., None]).to(y.dtype)
