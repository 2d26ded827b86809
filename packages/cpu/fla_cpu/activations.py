"""Activations and gated linear units on the CPU.

Registered: forward and backward of `sigmoid`, `logsigmoid`, `swish` and `elu_p1`, `swiglu_fwd`, `swiglu_fwdbwd`,
`powglu_fwd`, `powglu_fwdbwd`, and `swiglu_linear` and `powglu_linear`, which fla's GatedMLP calls. The last two are
registered as a whole because fla's autograd functions for them follow the GPU's autocast and not the CPU's, so that under
`torch.autocast('cpu')` their backward would multiply two dtypes.

Inputs are read with any strides; outputs are contiguous. The backward passes are differentiable: they change no tensor that a
second one needs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fla.modules.activations import ops

from fla_cpu.backend import implements, widen


def _store(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`result`, contiguous and in the dtype of `like`, as fla's kernels write it."""
    return result.to(like.dtype).contiguous()


def _silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of `F.silu`; PyTorch's function for it has no derivative."""
    if not torch.is_grad_enabled():
        return torch.ops.aten.silu_backward(dy, x)
    sigmoid = torch.sigmoid(x)
    return dy * sigmoid * (1 + x * (1 - sigmoid))


@implements(ops.sigmoid_fwd)
def sigmoid_fwd(x: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    return _store(torch.sigmoid(x), x)


@implements(ops.sigmoid_bwd)
def sigmoid_bwd(x: torch.Tensor, dy: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    return _store(torch.ops.aten.sigmoid_backward(widen(dy), torch.sigmoid(widen(x))), x)


@implements(ops.logsigmoid_fwd)
def logsigmoid_fwd(x: torch.Tensor, temperature: float = 1., output_contiguous: bool = False) -> torch.Tensor:
    return _store(F.logsigmoid(widen(x)).div_(temperature), x)


@implements(ops.logsigmoid_bwd)
def logsigmoid_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    temperature: float = 1.,
    output_contiguous: bool = False,
) -> torch.Tensor:
    return _store((torch.sigmoid(-widen(x)) * dy).div_(temperature), x)


@implements(ops.swish_fwd)
def swish_fwd(x: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    return _store(F.silu(x), x)


@implements(ops.swish_bwd)
def swish_bwd(x: torch.Tensor, dy: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    return _store(_silu_backward(widen(dy), widen(x)), x)


@implements(ops.elu_p1_fwd)
def elu_p1_fwd(x: torch.Tensor) -> torch.Tensor:
    wide = widen(x)
    return _store(torch.where(wide >= 0, wide + 1, wide.clamp_max(0).exp_()), x)


@implements(ops.elu_p1_bwd)
def elu_p1_bwd(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return _store(widen(x).clamp_max(0).exp_() * dy, x)


def _check_shapes(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor | None = None) -> None:
    if x.shape != y.shape or (g is not None and g.shape != x.shape):
        shapes = ', '.join(str(tuple(t.shape)) for t in (x, y, g) if t is not None)
        raise ValueError(f'the arguments of a gated linear unit must have one shape, got {shapes}')


@implements(ops.swiglu_fwd)
def swiglu_fwd(x: torch.Tensor, y: torch.Tensor, output_contiguous: bool = False) -> torch.Tensor:
    """`silu(x) * y`."""
    _check_shapes(x, y)
    return _store(F.silu(widen(x)).mul_(y), x)


@implements(ops.swiglu_fwdbwd)
def swiglu_fwdbwd(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    use_weight: bool = False,
    output_contiguous: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `x` and `y` for the output's gradient `g` and, with `use_weight`, the output."""
    _check_shapes(x, y, g)
    wide_x, wide_g = widen(x), widen(g)
    gate = F.silu(wide_x)
    dx = _store(_silu_backward(wide_g * y, wide_x), x)
    dy = _store(wide_g * gate, y)
    return (dx, dy, _store(gate * y, x)) if use_weight else (dx, dy)


def _powglu_gate(x: torch.Tensor, power: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`sigmoid(x) * x^p` with `p = power / (sqrt(x) + 1)` where x > 0 and p = 1 elsewhere, and its derivative."""
    sigmoid = torch.sigmoid(x)
    positive = x > 0
    # keep the other values out of the logarithm
    base = torch.where(positive, x, 1.0)
    root, log = base.sqrt(), base.log()
    exponent = power / (root + 1)
    gate = torch.where(positive, (exponent * log).exp_(), x) * sigmoid
    slope = exponent / base - power * log / (2 * root * (root + 1).square_())
    rising = gate * (slope + 1 - sigmoid)
    return gate, torch.where(positive, rising, sigmoid * (1 + x * (1 - sigmoid)))


@implements(ops.powglu_fwd)
def powglu_fwd(x: torch.Tensor, y: torch.Tensor, power: float = 3.0, output_contiguous: bool = False) -> torch.Tensor:
    """`gate(x) * y` with the gate of `_powglu_gate`."""
    _check_shapes(x, y)
    gate, _ = _powglu_gate(widen(x), power)
    return _store(gate.mul_(y), x)


@implements(ops.powglu_fwdbwd)
def powglu_fwdbwd(
    x: torch.Tensor,
    y: torch.Tensor,
    g: torch.Tensor,
    power: float = 3.0,
    use_weight: bool = False,
    output_contiguous: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `x` and `y` for the output's gradient `g` and, with `use_weight`, the output."""
    _check_shapes(x, y, g)
    gate, slope = _powglu_gate(widen(x), power)
    wide_g = widen(g)
    dx, dy = _store(slope.mul_(wide_g).mul_(y), x), _store(wide_g * gate, y)
    return (dx, dy, _store(gate * y, x)) if use_weight else (dx, dy)


@implements(ops.swiglu_linear)
def swiglu_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`(silu(x) * y) @ weight.T + bias`, differentiable."""
    return F.linear(ops.swiglu(x, y), weight, bias)


@implements(ops.powglu_linear)
def powglu_linear(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    power: float = 3.0,
) -> torch.Tensor:
    """`(gate(x) * y) @ weight.T + bias`, differentiable."""
    return F.linear(ops.powglu(x, y, power), weight, bias)
