"""What the kernels of both updates share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from fla_longhorn.ops.pool import PAD_SLOT_ID, Pool

INTERPRETING = tl.constexpr(knobs.runtime.interpret)

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
def first_slot(bos, i_n, T, SIZE, IS_VARLEN: tl.constexpr):
    """Slot (int64) of the first `SIZE` tokens of sequence `i_n`, by the rule of `ops/checkpoints.py`."""
    if IS_VARLEN:
        return bos // SIZE + i_n
    else:
        return i_n.to(tl.int64) * tl.cdiv(T, SIZE)


@triton.jit
def has_spare_slot(bos, eos, SIZE):
    """Whether a packed sequence owns a slot more than its tokens fill: none or one, behind the others.

    Forward writes zeros to that one, because an operator's outputs have no elements that nobody wrote.
    """
    return tl.cdiv(eos - bos, SIZE) <= eos // SIZE - bos // SIZE


@triton.jit
def locate_states(i_n, state_indices, final_state_indices, has_initial_state, pad_slot_id):
    """Rows (int64) of the states before and after sequence `i_n`, whether to read and to write them, whether it has any.

    The rules are those of `ops/pool.py`.
    """
    first = i_n.to(tl.int64)
    used = first >= 0
    if state_indices is not None:
        first = tl.load(state_indices + i_n).to(tl.int64)
        used = (first >= 0) & (first != pad_slot_id)
    last, written, read = first, used, used
    if final_state_indices is not None:
        last = tl.load(final_state_indices + i_n).to(tl.int64)
        written = used & (last >= 0) & (last != pad_slot_id)
    if has_initial_state is not None:
        read = used & (tl.load(has_initial_state + i_n) != 0)
    return first, last, read, written, used


@triton.jit
def only_if(flag, m):
    """The mask `m` where the scalar `flag` holds, else false."""
    # not `m & flag`: the interpreter's masks can't come from a scalar
    return m & (tl.zeros(m.shape, tl.int32) + flag.to(tl.int32) > 0)


def row_arguments(pool: Pool | None, size: int) -> dict:
    """What a kernel takes for `locate_states`, and how far apart the states of `size` elements lie."""
    if pool is None:
        choices = dict(state_indices=None, final_state_indices=None, has_initial_state=None)
        return dict(**choices, pad_slot_id=PAD_SLOT_ID, s_h=size, POOLED=False)
    return dict(**pool.choices, pad_slot_id=pool.pad_slot_id, s_h=pool.states.stride(0), POOLED=True)


def with_token_stride(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` [B, T, H, V] and the stride of its tokens, copied unless heads and channels are dense and rows follow each other."""
    B, T, H, V = x.shape
    dense = (V == 1 or x.stride(3) == 1) and (H == 1 or x.stride(2) == V)
    if not dense or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):
        x = x.contiguous()
    return x, x.stride(1 if T > 1 else 0)
