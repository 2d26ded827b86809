"""fla's gate in the kernel: the logarithms of decays from a projection and a layer's parameters, before the operator runs."""

from __future__ import annotations

import math
import numbers

import torch
import torch.nn.functional as F

from fla_longhorn.ops.inputs import check_shape, check_tensor


def log_decays(
    g: torch.Tensor, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, lower_bound: float | None = None,
) -> torch.Tensor:
    r"""The formulas of `fla.ops.kda.chunk_kda` and `fla.ops.gated_delta_rule` (fla 0.6), in float32 or, for doubles, float64.

    .. math::
        -\exp(A_{log}) \, \mathrm{softplus}(g + dt_{bias}) \qquad \text{or with a lower bound} \qquad
        \mathrm{bound} \cdot \sigma(\exp(A_{log}) (g + dt_{bias}))

    g is `[B, T, H]` or `[B, T, H, V]`, A_log `[H]`, dt_bias `[H]` or `[H * V]`. Without A_log, its exponential is one.
    """
    given = [x for x in (g, A_log, dt_bias) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(g.shape[2:])
    rate = 1 if A_log is None else A_log.to(dtype).exp().view(-1, *[1] * (g.dim() - 3))
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def apply_gate(
    q: torch.Tensor, g: torch.Tensor | None, use_gate_in_kernel: bool, A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None, lower_bound: float | None, *, allow_float64: bool = False,
) -> torch.Tensor | None:
    """The operator's `g`: :func:`log_decays` with `use_gate_in_kernel`, else as it is. Errors name the argument."""
    # the usual call, in as little time as can be
    if use_gate_in_kernel is False and A_log is dt_bias is lower_bound is None:
        return g
    if not isinstance(use_gate_in_kernel, bool):
        raise TypeError(f'use_gate_in_kernel must be True or False, got {type(use_gate_in_kernel).__name__}')
    if not use_gate_in_kernel:
        for name, x in (('A_log', A_log), ('dt_bias', dt_bias), ('lower_bound', lower_bound)):
            if x is not None:
                raise ValueError(f'{name} must be None without use_gate_in_kernel=True, got {type(x).__name__}')
        return g
    if g is None:
        raise ValueError('g must be what the gate is computed from with use_gate_in_kernel=True, got None')
    check_tensor('q', q, q, allow_float64)
    check_tensor('g', g, q, allow_float64)
    if g.dim() not in (3, 4):
        raise ValueError(f'g must have shape [B, T, H] or [B, T, H, V], got {list(g.shape)}')
    if A_log is None and lower_bound is None:
        raise ValueError('A_log must be given with use_gate_in_kernel=True unless lower_bound is, got None for both')
    H, size, meaning = g.shape[2], math.prod(g.shape[2:]), '[H]' if g.dim() == 3 else '[H * V]'
    for name, x, length, shape in (('A_log', A_log, H, '[H]'), ('dt_bias', dt_bias, size, meaning)):
        if x is not None:
            check_tensor(name, x, q, allow_float64)
            check_shape(name, x, (length,), f'{shape} for the g given')
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, (numbers.Real, torch.SymFloat)):
            raise TypeError(f'lower_bound must be a number or None, got {type(lower_bound).__name__}')
        if not -math.inf < lower_bound < 0:
            raise ValueError(f'lower_bound must be finite and below 0, got {lower_bound}')
    return log_decays(g, A_log, dt_bias, lower_bound)
