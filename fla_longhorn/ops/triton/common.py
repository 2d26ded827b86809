"""Helpers of the kernels of both updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from fla.utils import custom_device_ctx
from triton import knobs
from triton.language.extra import libdevice
from triton.runtime.errors import OutOfResources

from fla_longhorn.ops.arguments import Arguments, StepOptions
from fla_longhorn.ops.triton.device import SLOWER, Card, card_of
from fla_longhorn.ops.triton.launch import LaunchKey

# names of the token strides in kernels
STRIDES = {'q': 'S_Q', 'k': 'S_K', 'v': 'S_V', 'beta': 'S_B', 'z': 'S_Z', 'g': 'S_G'}

# launch option: fused multiply-add, faster and more accurate; Triton's default up to 3.9 only
FUSED = dict(enable_fp_fusion=True)
# where several lanes store copies of one sum: fused with different products, the copies would differ in their last bit, and
# the hardware would choose the one that stays
SAME_IN_ALL_LANES = dict(enable_fp_fusion=False)


# constants are functions: whether the cache's key of a kernel holds a global of its helpers depends on which kernels were used
# before (Triton 3.6 to 3.9), so that another process may compile it again
@triton.constexpr_function
def interpreting():
    return knobs.runtime.interpret


@triton.constexpr_function
def log2e():
    return 1.4426950408889634


@triton.jit
def divide(b_a, b_b):
    """`b_a / b_b` for divisors in [1, 2^126], by one reciprocal and one product: correct to two units in the last place.

    Zero beyond 2^126 (8.5e37), the range of the hardware's approximate division: with a divisor `1 + beta |k|^2`, such a key
    does not change the state. |k|^2 overflows float32 at 2^128.
    """
    if interpreting():
        return b_a / b_b
    else:
        return libdevice.fast_dividef(b_a, b_b)


@triton.jit
def sigmoid(b_x):
    return divide(1.0, 1.0 + tl.exp2(b_x * -log2e()))


# OPTIONS of the kernels is `StepOptions`; only these five functions read it. Triton 3.6 calls the last two with a tuple
@triton.jit
def step_sizes(b_beta, b_n, OPTIONS: tl.constexpr):
    """eps = c beta / (1 + beta |k|^2), or c / (1 + exp(-logit) + |k|^2) if `b_beta` is the logit of beta."""
    C: tl.constexpr = 2.0 if OPTIONS.allow_neg_eigval else 1.0
    if OPTIONS.use_beta_sigmoid_in_kernel:
        return divide(C, 1.0 + tl.exp2(b_beta * -log2e()) + b_n)
    elif OPTIONS.allow_neg_eigval:
        return divide(C * b_beta, 1.0 + b_beta * b_n)
    else:
        return divide(b_beta, 1.0 + b_beta * b_n)


@triton.jit
def step_factors(b_beta, b_n, OPTIONS: tl.constexpr):
    """(f, rest, slope): eps = f rest, and the gradient of beta (or its logit) is f slope deps."""
    if OPTIONS.use_beta_sigmoid_in_kernel:
        # the logit's gradient is e eps^2 deps, where e = exp(-logit)
        b_e = tl.exp2(b_beta * -log2e())
        b_eps = divide(1.0, 1.0 + b_n + b_e)
        b_slope = tl.minimum(b_e, 3e38) * b_eps
        if OPTIONS.allow_neg_eigval:
            b_eps *= 2.0
        return b_eps, 1.0, b_slope
    else:
        b_f = divide(1.0, 1.0 + b_beta * b_n)
        if OPTIONS.allow_neg_eigval:
            return 2.0 * b_f, b_beta, b_f
        else:
            return b_f, b_beta, b_f


@triton.constexpr_function
def norm_slope(OPTIONS):
    """The derivative of eps by |k|^2 is this times -eps^2."""
    return 1 / StepOptions(*OPTIONS).factor


@triton.constexpr_function
def stores_cs(OPTIONS):
    """Whether the exact update's replay stores `cs`, R f slope. Not if rest is 1: U is R f, and backward computes slopes."""
    return not StepOptions(*OPTIONS).use_beta_sigmoid_in_kernel


@triton.constexpr_function
def no_step(OPTIONS):
    """The value of beta (or its logit) for a step size of zero."""
    return float('-inf') if StepOptions(*OPTIONS).use_beta_sigmoid_in_kernel else 0.0


@triton.jit
def decays(b_g):
    """e^g, which multiplies the state before a token's step: 0 for g = -inf."""
    return tl.exp2(b_g.to(tl.float32) * log2e())


@triton.jit
def split_rows(x):
    """The even and the odd rows of `[R, BV]`; takes no instructions."""
    R: tl.constexpr = x.shape[0]
    BV: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (R // 2, 2, BV)), (0, 2, 1)))


@triton.jit
def add_rows(b_acc, a, m, R: tl.constexpr, FMA: tl.constexpr):
    if m.shape[0] == R:
        if b_acc is None:
            return a * m
        else:
            return tl.fma(a, m, b_acc) if FMA else b_acc + a * m
    else:
        a0, a1 = split_rows(a)
        m0, m1 = split_rows(m)
        return add_rows(add_rows(b_acc, a0, m0, R, FMA), a1, m1, R, FMA)


@triton.jit
def weighted_rows(b_a, b_m, R: tl.constexpr, FMA: tl.constexpr = False):
    """sum_j a[j] m[j, v] as `[1, BV]`, in R chains of FMA: `tl.sum` would leave half of the products unfused.

    The compiler fuses, and chooses which of the first two products of a chain it fuses; with FMA it has no choice.
    """
    if interpreting():
        return tl.sum(b_a * b_m, 0)[None, :]
    else:
        b_acc = add_rows(None, tl.broadcast_to(b_a, b_m.shape), b_m, R, FMA)
        return b_acc if R == 1 else tl.sum(b_acc, 0)[None, :]


def padded_state_size(K: int) -> int:
    return max(triton.next_power_of_2(K), 16)


def operand_precision(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, card: Card) -> str:
    """How products round their operands: `bf16`, `ieee` (float32, unrounded) or `tf32`, which holds every float16 exactly."""
    dtypes = {q.dtype, k.dtype, v.dtype}
    if torch.float32 in dtypes:
        return 'ieee'
    if torch.float16 not in dtypes:
        return 'bf16'
    return 'tf32' if card.backend == 'cuda' else 'ieee'


def launch_key(args: Arguments) -> LaunchKey:
    card = card_of(args.q.device)
    return LaunchKey(args.k.shape[-1], args.v.shape[-1], operand_precision(args.q, args.k, args.v, card), card)


@contextmanager
def launching(args: Arguments) -> Iterator[None]:
    """Launches on the tensors' device; one for which the card has too little memory on chip raises a ValueError.

    fla's `input_guard` would copy inputs with strides, which the kernels read in place.
    """
    with custom_device_ctx(args.q.device.index):
        try:
            yield
        except OutOfResources as error:
            key = launch_key(args)
            raise ValueError(
                f'K = {key.K} in {args.q.dtype} requires {error.required} of {error.name} on {key.card.name}, '
                f'which has {error.limit}; use a smaller K, another dtype, or {SLOWER}',
            ) from error


def is_scalar(x: torch.Tensor | None) -> bool:
    """Whether there is one decay, or one step size, per head."""
    return x is not None and x.dim() == 3


def new_dg(g: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor | None:
    """Where kernels store the gradient of g: one per channel, so that a gate per head has its sum over them in float32."""
    if g is None:
        return None
    return v.new_empty(v.shape, dtype=g.dtype if g.dim() == 4 else torch.float32)


def of_gate(dg: torch.Tensor | None, g: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of g from what kernels stored by :func:`new_dg`."""
    return dg if dg is None or g is None or g.dim() == 4 else dg.sum(-1).to(g.dtype)


def with_token_stride(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` [B, T, H, V] and its token stride; copied unless heads and channels are dense and rows have no gaps."""
    B, T, H, V = x.shape
    dense = (V == 1 or x.stride(3) == 1) and (H == 1 or x.stride(2) == V)
    if not dense or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1 if T > 1 else 0)


def strided_inputs(args: Arguments, names: tuple[str, ...] = tuple(STRIDES)) -> tuple[Arguments, dict[str, int]]:
    """The arguments and the token strides of `names`, which are copied only if a kernel cannot read them strided."""
    x: dict[str, Any] = {name: getattr(args, name) for name in ('beta', 'initial_state', 'D', 'cu_seqlens', *names)}
    strides = {'S_Z': 0, 'S_G': 0}
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
