"""RWKV's token shift and squared ReLU on the CPU.

Neither is in fla's registry: the first is kernel launchers, which are replaced for CPU tensors; the second is compiled by
`torch.compile`, which needs a C++ compiler on a CPU.
"""

from __future__ import annotations

from functools import wraps

import torch
from fla.modules import token_shift
from fla.modules.activations import ops

from fla_cpu.backend import CPUBackend, replaces, widen

_shift_forward, _shift_backward = token_shift.token_shift_fwd, token_shift.token_shift_bwd
_sqrelu_forward, _sqrelu_backward = ops.sqrelu_fwd, ops.sqrelu_bwd


def _on_cpu(x: torch.Tensor) -> bool:
    return x.device.type == 'cpu' and CPUBackend().is_enabled()


def _bounds(rows: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last row `[N]` of each sequence of `[B, T, D]` as `[B * T, D]`; sequences are not empty."""
    B, T, _ = rows.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (B + 1) * T, T, dtype=torch.int64, device=rows.device)
    return cu_seqlens[:-1].long(), cu_seqlens[1:].long() - 1


@replaces(token_shift, 'token_shift_fwd')
@wraps(_shift_forward)
def token_shift_fwd(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int, int, bool, torch.Tensor | None]:
    """`y_t = x_{t-1} - x_t`, with `cache` `[N, D]` or zeros before a sequence; the last rows `[N, D]` are the next cache."""
    if not _on_cpu(x):
        return _shift_forward(x, cu_seqlens, cache, output_cache, chunk_indices)
    first, last = _bounds(x, cu_seqlens)
    rows = x.flatten(0, 1)
    previous = rows.roll(1, 0)
    previous[first] = 0 if cache is None else cache.reshape(len(first), -1).to(x.dtype)
    return (previous - rows).view_as(x), len(first), x.shape[1], True, rows[last] if output_cache else None


@replaces(token_shift, 'token_shift_bwd')
@wraps(_shift_backward)
def token_shift_bwd(
    dy: torch.Tensor,
    N: int,
    T: int,
    dcache: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    use_short_kernel: bool = True,
    has_init_cache: bool = False,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`dx_t = dy_{t+1} - dy_t`, with the next cache's gradient `[N, D]` or zeros after a sequence; that of the cache."""
    if not _on_cpu(dy):
        return _shift_backward(dy, N, T, dcache, cu_seqlens, use_short_kernel, has_init_cache, chunk_indices)
    first, last = _bounds(dy, cu_seqlens)
    rows = dy.flatten(0, 1)
    following = rows.roll(-1, 0)
    following[last] = 0 if dcache is None else dcache.reshape(N, -1).to(dy.dtype)
    return (following - rows).view_as(dy), rows[first] if has_init_cache else None


@replaces(ops, 'sqrelu_fwd')
@wraps(_sqrelu_forward)
def sqrelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """`relu(x)^2` in the dtype of `x`."""
    return widen(x).relu().square().to(x.dtype) if _on_cpu(x) else _sqrelu_forward(x=x)


@replaces(ops, 'sqrelu_bwd')
@wraps(_sqrelu_backward)
def sqrelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`2 g relu(x)` in the dtype of `x`."""
    return (2 * widen(g) * widen(x).relu()).to(x.dtype) if _on_cpu(x) else _sqrelu_backward(g=g, x=x)
