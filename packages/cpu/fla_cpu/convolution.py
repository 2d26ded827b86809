"""The causal depthwise convolution on the CPU.

Registered: `causal_conv1d_fwd`, `causal_conv1d_bwd`, `causal_conv1d_update_states` and `causal_conv1d_update`, which are
all that fla's `causal_conv1d` and `ShortConvolution` call.

A state `[N, D, W]` holds the last W inputs of each sequence, the newest in column W - 1, so position -j before a sequence
is column W - j. An output looks back at W - 1 inputs; column 0 is therefore kept but never convolved.

Sequences without an initial state, of float32 or 16-bit tensors and kernels of four taps, run in one compiled loop per pass
(`fla_cpu.loops`). This file computes the others: the convolution of the whole stream is W shifted multiply-adds. They ignore
sequence boundaries and initial states, which only affects the first W - 1 outputs of each sequence: those are recomputed on
small windows (`_Window`).
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from fla.modules.causal_conv1d import ops

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

# a block takes 2 MiB in float32
BLOCK_ELEMENTS = 1 << 19


def _convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`y[t] = sum_j weight[W - 1 - j] * x[t - j]` with zeros before the start; `x` `[B, T, D]`, `weight` `[D, W]`."""
    taps = weight.t().contiguous()
    y = x * taps[-1]
    for lag in range(1, min(len(taps), x.shape[1])):
        y[:, lag:].addcmul_(x[:, :-lag], taps[-1 - lag])
    return y


def _convolve_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `dx` `[B, T, D]` and `dweight` `[D, W]`."""
    B, T, D = x.shape
    taps = weight.t().contiguous()
    dtaps = torch.zeros_like(taps)
    dx = dy * taps[-1]
    # blocks of time keep the products in cache; allocating whole ones costs more than the arithmetic
    size = max(1, BLOCK_ELEMENTS // max(1, B * D))
    for start in range(0, T, size):
        stop = min(start + size, T)
        for lag in range(min(len(taps), stop)):
            first = max(start, lag)
            late, early = dy[:, first:stop], x[:, first - lag:stop - lag]
            dtaps[-1 - lag] += (late * early).sum((0, 1))
            if lag > 0:
                dx[:, first - lag:stop - lag].addcmul_(late, taps[-1 - lag])
    return dx, dtaps.t()


class _Window:
    """Rows `first .. first + size` of every sequence, as one gather and its adjoint.

    Positions count from the start of a sequence: negative ones are in its initial state, those after its end are zeros.

    Args:
        x (torch.Tensor): the stream `[B, T, D]`.
        cu_seqlens (torch.Tensor, Optional): bounds `[N + 1]` of packed sequences, with B = 1. `None`: each row is a sequence.
        width (int): W, the number of columns of a state.
        size (int): the number of rows to take.
        from_end (bool): whether the window ends at the end of the sequence; if not, it starts with W - 1 rows of history.
    """

    def __init__(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, width: int, size: int, from_end: bool):
        if cu_seqlens is None:
            batch = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
            start, length = torch.zeros_like(batch), torch.full_like(batch, x.shape[1])
        else:
            start, length = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
            batch = torch.zeros_like(start)
        first = length[:, None] - size if from_end else 1 - width
        position = first + torch.arange(size, dtype=torch.int64, device=x.device).expand(len(start), size)

        n, i = ((position >= 0) & (position < length[:, None])).nonzero(as_tuple=True)
        self.tokens, self.stream = (n, i), (batch[n], start[n] + position[n, i])
        n, i = (position < 0).nonzero(as_tuple=True)
        self.history, self.state = (n, i), (n, width + position[n, i])
        self.shape = (len(start), size, x.shape[-1])

    def read(self, x: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Gather the rows `[N, size, D]` from the stream `[B, T, D]` and the states `[N, D, W]`."""
        rows = x.new_zeros(self.shape)
        rows[self.tokens] = x[self.stream]
        if state is not None:
            rows[self.history] = state.mT[self.state].to(x.dtype)
        return rows

    def add_gradient(self, drows: torch.Tensor, dx: torch.Tensor, dstate: torch.Tensor | None) -> None:
        """Add the gradient of the rows to those of the stream and of the states, in place."""
        dx.index_put_(self.stream, drows[self.tokens], accumulate=True)
        if dstate is not None:
            dstate.mT.index_put_(self.state, drows[self.history], accumulate=True)


def _heads(x: torch.Tensor, cu_seqlens: torch.Tensor | None, state: torch.Tensor | None, width: int) -> _Window | None:
    """The window in which the first W - 1 outputs of every sequence are computed, if they need one."""
    if width == 1 or (cu_seqlens is None and state is None):
        return None
    return _Window(x, cu_seqlens, width, size=2 * (width - 1), from_end=False)


def _preactivation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    heads: _Window | None,
) -> torch.Tensor:
    y = _convolve(x, weight)
    if heads is not None:
        y[heads.stream] = _convolve(heads.read(x, state), weight)[heads.tokens]
    return y if bias is None else y.add_(bias)


def _loops(
    x: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    dy: torch.Tensor | None = None,
) -> ModuleType | None:
    """The compiled loops, if they support this convolution or its backward for `dy`, else None."""
    loops = load_loops(taps, bias) if has_memory(x, taps, bias, dy) else None
    return loops if loops is not None and loops.convolves(x, taps, cu_seqlens) else None


def _swish(activation: str | None) -> bool:
    if activation not in (None, 'swish', 'silu'):
        raise ValueError(f"activation must be 'swish', 'silu' or None, got {activation!r}")
    return activation is not None


@implements(ops.causal_conv1d_fwd)
def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve `x` `[B, T, D]` (or `[B, T, H, D / H]`) with `weight` `[D, W]`; return the output and the states."""
    rows, swish = x.flatten(2), _swish(activation)
    near = widen_for_loops(rows)
    dtype = torch.float64 if near.dtype is torch.float64 else torch.float32
    taps, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    loops = _loops(near, taps, shift, cu_seqlens) if initial_state is None else None
    if loops is not None:
        # a residual is added before the sum is rounded
        y = loops.convolve(near, taps, shift, cu_seqlens, swish, None if residual is None else dtype)
    else:
        wide = widen(near)
        heads = _heads(wide, cu_seqlens, initial_state, weight.shape[1])
        y = _preactivation(wide, taps, shift, initial_state, heads)
        if swish:
            y = F.silu(y, inplace=True)
    if residual is not None:
        y.add_(residual.flatten(2))
    final_state = None
    if output_final_state:
        final_state = causal_conv1d_update_states(rows, weight.shape[1], initial_state, cu_seqlens)
    return y.to(x.dtype).view(x.shape), final_state


@implements(ops.causal_conv1d_bwd)
@differentiable_once('causal convolution', 'call torch.nn.functional.conv1d, or torch.func, under which Longhorn runs PyTorch')
def causal_conv1d_bwd(
    x: torch.Tensor,
    dy: torch.Tensor,
    dht: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    chunk_indices: torch.LongTensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `x`, `weight`, `bias`, `residual` and `initial_state` (`None` for absent ones)."""
    if torch._C._functorch.is_legacy_batchedtensor(dy):
        raise NotImplementedError(
            'the short convolution takes no batched gradients (is_grads_batched=True, vectorize=True): call torch.func.vmap'
        )
    rows, drows = widen_for_loops(x.flatten(2)), widen_for_loops(dy.flatten(2))
    weight = require('weight', weight)
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    taps, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    swish, dresidual = _swish(activation), None if residual is None else dy
    loops = _loops(rows, taps, shift, cu_seqlens, drows) if initial_state is None and dht is None else None
    if loops is not None:
        dx, dtaps, dshift = loops.convolve_gradients(drows, rows, taps, shift, cu_seqlens, swish)
        dbias = None if bias is None else dshift.to(bias)
        return dx.to(x.dtype).view(x.shape), dtaps.to(weight), dbias, dresidual, None

    wide, dz = widen(rows), widen(drows)
    heads = _heads(wide, cu_seqlens, initial_state, weight.shape[1])
    if swish:
        z = _preactivation(wide, taps, shift, initial_state, heads)
        dz = torch.ops.aten.silu_backward(dz, z)
    elif heads is not None:
        dz = dz.clone()
    dbias = None if bias is None else dz.sum((0, 1)).to(bias)
    dstate = None if initial_state is None else torch.zeros_like(initial_state, dtype=wide.dtype)

    if heads is None:
        dx, dtaps = _convolve_backward(dz, wide, taps)
    else:
        # gradients of these outputs must not cross the start of their sequence in the stream: the windows compute them
        drows = wide.new_zeros(heads.shape)
        drows[heads.tokens] = dz[heads.stream]
        dz[heads.stream] = 0
        dx, dtaps = _convolve_backward(dz, wide, taps)
        drows, dtaps_heads = _convolve_backward(drows, heads.read(wide, initial_state), taps)
        dtaps = dtaps + dtaps_heads
        heads.add_gradient(drows, dx, dstate)
    if dht is not None:
        tails = _Window(wide, cu_seqlens, dht.shape[-1], size=dht.shape[-1], from_end=True)
        tails.add_gradient(dht.mT.to(wide.dtype), dx, dstate)

    if dstate is not None and initial_state is not None:
        dstate = dstate.to(initial_state.dtype)
    return dx.to(x.dtype).view(x.shape), dtaps.to(weight), dbias, dresidual, dstate


@implements(ops.causal_conv1d_update_states)
def causal_conv1d_update_states(
    x: torch.Tensor,
    state_len: int,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last `state_len` inputs `[N, D, state_len]` of every sequence of `x` `[B, T, D]` (or packed `[T, D]`)."""
    rows = x if x.dim() == 3 else x[None]
    if cu_seqlens is None and rows.shape[1] >= state_len:
        return rows[:, rows.shape[1] - state_len:].mT.contiguous()
    tails = _Window(rows, cu_seqlens, state_len, size=state_len, from_end=True)
    return tails.read(rows, initial_state).mT.contiguous()


@implements(ops.causal_conv1d_update)
@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve one token per sequence, `x` `[N, D]`, `[N, 1, D]` or `[1, N, D]`, and update `cache` `[N, D, W]` in place."""
    weight = require('weight', weight)
    D, W = weight.shape
    token = widen_for_loops(x.reshape(-1, D))
    alone = cache is not None and residual is None and has_memory(token, cache, weight, bias)
    loops = load_loops(cache, weight, bias) if alone and token.dtype in LOOP_DTYPES else None
    if loops is not None:
        return loops.convolve_token(token, cache, weight, bias, _swish(activation)).to(x.dtype).view(x.shape), cache
    token = widen(token)
    past = token.new_zeros(*token.shape, W - 1) if cache is None else cache[..., 1:].to(token.dtype)
    window = torch.cat([past, token[..., None]], -1)
    y = (window * weight).sum(-1)
    if bias is not None:
        y.add_(bias)
    if _swish(activation):
        y = F.silu(y, inplace=True)
    if residual is not None:
        y.add_(residual.reshape(-1, D))
    if cache is not None:
        cache.copy_(window)
    return y.to(x.dtype).view(x.shape), cache
