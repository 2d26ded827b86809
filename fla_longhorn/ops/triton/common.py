"""What the kernels of both updates share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

INTERPRETING = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def divide(b_a, b_b):
    """`b_a / b_b` for divisors in [1, 1e13], by one reciprocal and one product: correct to two units in the last place."""
    if INTERPRETING:
        return b_a / b_b
    else:
        return libdevice.fast_dividef(b_a, b_b)


@triton.jit
def first_slot(bos, i_n, T, SIZE, IS_VARLEN: tl.constexpr):
    """Slot (int64) of the first `SIZE` tokens of sequence `i_n`, by the rule of `ops/checkpoints.py`."""
    if IS_VARLEN:
        return bos // SIZE + i_n
    else:
        return i_n.to(tl.int64) * tl.cdiv(T, SIZE)
