"""What a compiled loop may read and write.

Loops take addresses and check no bounds, so a launch states each tensor's shape and dtypes to :func:`address`, which is the
only way to one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

import torch
from torch import Tensor

from fla_kit.numba.memory import BITS

FLOAT32 = (torch.float32,)
# tensors of other classes may have no memory to read
ORDINARY = (Tensor, torch.nn.Parameter)


def address(
    name: str, x: Tensor | None, shape: tuple[int, ...], dtypes: Collection[torch.dtype] = BITS, *, optional: bool = False,
    stride: int | None = None,
) -> int:
    """The address of `x`, which the caller keeps alive; 0 for None where it is `optional`.

    Raises:
        ValueError: `x` is not a dense tensor of `shape` and one of `dtypes` in the CPU's memory; with `stride`, dense rows
            that lie `stride` elements apart.
    """
    if x is None and optional:
        return 0
    if not is_stored(x, shape, stride is None) or x.dtype not in dtypes or not (stride is None or lie_apart(x, stride)):
        rows = '' if stride is None else f', in rows {stride} elements apart,'
        wanted = ' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)
        raise ValueError(f'{name} must have shape {list(shape)}{rows} and be dense {wanted} on the CPU, got {described(x)}')
    return x.data_ptr()


def stored(name: str, x: Tensor | None, shape: tuple[int, ...], *, optional: bool = False) -> Tensor | None:
    """`x`, which the caller converts, of any dtype and strides; raises as :func:`address` does."""
    if not (x is None and optional) and not is_stored(x, shape):
        raise ValueError(f'{name} must have shape {list(shape)} and be on the CPU, got {described(x)}')
    return x


def is_stored(x: Tensor | None, shape: tuple[int, ...], dense: bool = False) -> TypeGuard[Tensor]:
    if x is None or type(x) not in ORDINARY or x.shape != shape or not x.is_cpu or x.is_neg():
        return False
    size = x.numel()
    if not x.is_contiguous() and size > 0:
        if dense:
            return False
        size = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    # FSDP2 frees parameters by resizing their storage
    return x.untyped_storage().nbytes() >= x.itemsize * (x.storage_offset() + size)


def lie_apart(x: Tensor, stride: int) -> bool:
    # `len` of a tensor takes ten times as long
    n = x.shape[0]
    return n == 0 or ((n == 1 or x.stride(0) == stride) and (x.is_contiguous() or x[0].is_contiguous()))


def described(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    dtype = str(x.dtype).removeprefix('torch.')
    return f'{list(x.shape)} of {dtype} on {x.device} with strides {list(x.stride())} and {x.untyped_storage().nbytes()} bytes'
