"""What the kernels of both updates share."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from fla_longhorn.ops.arguments import Arguments

INTERPRETING = tl.constexpr(knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
# what the kernels call the strides between tokens
STRIDES = {'q': 'S_Q', 'k': 'S_K', 'v': 'S_V', 'beta': 'S_B', 'z': 'S_Z'}

# Launch option: a product that is added takes one instruction. Triton's own choice, up to 3.9; later ones choose not to, which
# would be slower and less accurate.
FUSED = dict(enable_fp_fusion=True)
# In its place for sums whose copies several lanes store. Each lane would fuse its own product into such a sum, and the copies
# differ in their last bit: which one stays would be up to the hardware.
SAME_IN_ALL_LANES = dict(enable_fp_fusion=False)


@triton.jit
def divide(b_a, b_b):
    """`b_a / b_b` for divisors in [1, 2^126], by one reciprocal and one product: correct to two units in the last place.

    Zero beyond 2^126 (8.5e37), the range of the hardware's approximate division. With divisors `1 + beta |k|^2`, a longer key
    writes nothing to the state; float32 itself has no |k|^2 beyond 2^128.
    """
    if INTERPRETING:
        return b_a / b_b
    else:
        return libdevice.fast_dividef(b_a, b_b)


@triton.jit
def sigmoid(b_x):
    return divide(1.0, 1.0 + tl.exp2(b_x * -LOG2E))


# OPTIONS of the kernels is `StepOptions`; these four functions are all that reads it
@triton.jit
def step_sizes(b_beta, b_n, OPTIONS: tl.constexpr):
    """eps = beta / (1 + beta |k|^2) from beta, or from its logit, where it is 1 / (1 + exp(-logit) + |k|^2)."""
    if OPTIONS.use_beta_sigmoid_in_kernel:
        return divide(1.0, 1.0 + tl.exp2(b_beta * -LOG2E) + b_n)
    else:
        return divide(b_beta, 1.0 + b_beta * b_n)


@triton.jit
def step_factors(b_beta, b_n, OPTIONS: tl.constexpr):
    """(s, r, slope): eps = s r, and what beta holds has the gradient s slope deps."""
    if OPTIONS.use_beta_sigmoid_in_kernel:
        # e = exp(-logit): the logit's gradient is e eps^2 deps
        b_e = tl.exp2(b_beta * -LOG2E)
        b_eps = divide(1.0, 1.0 + b_n + b_e)
        return b_eps, 1.0, tl.minimum(b_e, 3e38) * b_eps
    else:
        b_f = divide(1.0, 1.0 + b_beta * b_n)
        return b_f, b_beta, b_f


@triton.constexpr_function
def keeps_slopes(OPTIONS):
    """Whether the exact update's replay keeps R s slope. Where r is one it need not: U is R s, and slopes are made again."""
    return not OPTIONS.use_beta_sigmoid_in_kernel


@triton.constexpr_function
def no_step(OPTIONS):
    """What beta holds where the step size is zero."""
    return float('-inf') if OPTIONS.use_beta_sigmoid_in_kernel else 0.0


def padded_state_size(K: int) -> int:
    return max(triton.next_power_of_2(K), 16)


def with_token_stride(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` [B, T, H, V] and the stride of its tokens, copied unless heads and channels are dense and rows follow each other."""
    B, T, H, V = x.shape
    dense = (V == 1 or x.stride(3) == 1) and (H == 1 or x.stride(2) == V)
    if not dense or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1 if T > 1 else 0)


def strided_inputs(args: Arguments, names: tuple[str, ...] = tuple(STRIDES)) -> tuple[Arguments, dict[str, int]]:
    """The arguments, those of `names` copied only where a kernel cannot read them as strided, and the strides of these."""
    x: dict[str, Any] = {name: getattr(args, name) for name in ('beta', 'initial_state', 'D', 'cu_seqlens', *names)}
    strides = {'S_Z': 0}
    for name, value in x.items():
        if value is None:
            continue
        if name not in names:
            x[name] = value.contiguous()
        elif value.dim() == 3:
            x[name], strides[STRIDES[name]] = value.contiguous(), value.shape[2]
        else:
            x[name], strides[STRIDES[name]] = with_token_stride(value)
    return args._replace(**x), strides
