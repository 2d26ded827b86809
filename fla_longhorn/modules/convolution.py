"""fla's causal depthwise convolution: in PyTorch too, and for rows with padding that is known on the device only.

A state `[N, D, W]` holds the last W inputs of each sequence, the newest in column W - 1. An output depends on the W - 1
inputs before it, so column 0 is stored but not read.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from fla import modules

from fla_longhorn.modules.bare import FORWARDS
from fla_longhorn.modules.dispatch import differentiable_once, in_pytorch, widen
from fla_longhorn.modules.recompute import keep_inputs
from fla_longhorn.ops.plain import is_transformed

# the second and third dimension of a launch: fla's kernels have pieces of `PIECE` tokens in the one, rows in the other
MAX_GRID = 65535
PIECE = 64


def _taps(stream: torch.Tensor, weight: torch.Tensor, T: int) -> torch.Tensor:
    """`y[t] = sum_i weight[i] * stream[t + i]` for t < T; `stream` `[N, T + W - 1, D]`, `weight` `[D, W]`."""
    W = weight.shape[1]
    # the newest input first, as in packed sequences
    y = stream[:, W - 1:W - 1 + T] * weight[:, -1]
    for i in reversed(range(W - 1)):
        y = y + stream[:, i:i + T] * weight[:, i]
    return y


def _with_history(x: torch.Tensor, W: int, state: torch.Tensor | None) -> torch.Tensor:
    """`x` `[B, T, D]` behind the W inputs before it."""
    B, _, D = x.shape
    return torch.cat([x.new_zeros(B, W, D) if state is None else state.mT.to(x.dtype), x], 1)


def _convolve_rows(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve the rows of `x` `[B, T, D]`; return the new state `[B, D, W]` too."""
    T, stream = x.shape[1], _with_history(x, weight.shape[1], state)
    return _taps(stream[:, 1:], weight, T), stream[:, T:].mT


def _convolve_packed(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor | None, cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve the sequences packed in `x` `[1, T, D]` with boundaries `cu_seqlens` `[N + 1]`; return the new states."""
    _, T, D = x.shape
    W, N = weight.shape[1], cu_seqlens.shape[0] - 1
    starts, stops = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    tokens = torch.arange(T, dtype=cu_seqlens.dtype, device=x.device)
    # counted from the last sequence that starts at or before the token: empty sequences may start there too
    position = tokens - cu_seqlens[torch.searchsorted(cu_seqlens[:-1].contiguous(), tokens, right=True) - 1]
    stream = F.pad(x, (0, 0, W - 1, 0))
    y = x * weight[:, -1]
    for lag in range(1, W):
        inside = (position >= lag)[:, None]
        y = y + torch.where(inside, stream[:, W - 1 - lag:W - 1 - lag + T], 0) * weight[:, -1 - lag]

    offsets = torch.arange(W, dtype=cu_seqlens.dtype, device=x.device)
    last = stops - W + offsets
    ends = x[0, last.clamp_min(0)]
    if state is None:
        return y, torch.where((last >= starts)[..., None], ends, 0).mT
    history = state.mT.to(x.dtype)
    if W > 1:
        # contribution of the state to the first W - 1 outputs of its sequence
        heads = _taps(F.pad(history[:, 1:], (0, 0, 0, W - 1)), weight, W - 1)
        rows = starts + offsets[:-1]
        heads = torch.where((rows < stops)[..., None], heads, 0)
        y = y.index_add(1, rows.clamp_max(T - 1).flatten(), heads.flatten(0, 1)[None])
    before = history.gather(1, (W + last - starts).clamp_max(W - 1).long()[..., None].expand(N, W, D))
    return y, torch.where((last >= starts)[..., None], ends, before).mT


class ShortConvolution(modules.ShortConvolution):
    """:class:`fla.modules.ShortConvolution`, in PyTorch where fla's kernels cannot run, and for rows with padding."""

    def is_launched(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
        """Whether fla's kernels can run for `x` `[B, T, ...]`: a launch has room for so many rows and tokens."""
        B, T = x.shape[:2]
        pieces = -(-T // PIECE) + (0 if cu_seqlens is None else cu_seqlens.shape[0])
        return not in_pytorch(x) and (x.is_cpu or max(B, pieces) <= MAX_GRID)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None, output_final_state: bool = False, cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None, lengths: torch.Tensor | None = None, order: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As fla's, with `lengths` `[B]`: the number of inputs per row, the rest being padding; not read on the host.

        The inputs of a row are its first ones, or those that `order` `[B, T]`, a permutation of each row, moves there.

        With `output_final_state`, a single token without autograd updates `cache` in place, unless it is packed in a trace.
        Without it, or if `cache` requires a gradient, `cache` is not changed.
        """
        if lengths is not None:
            y, state = self.forward_padded(x, residual, cache, output_final_state, lengths, order)
        elif self.is_launched(x, cu_seqlens):
            if cache is not None and (not output_final_state or cache.requires_grad) and not torch.is_grad_enabled():
                # fla's update of a single token overwrites it
                cache = cache.clone()
            y, state = super().forward(x, residual, mask, cache, output_final_state, cu_seqlens, chunk_indices, **kwargs)
            return differentiable_once(y, 'convolution'), state
        else:
            y, state = keep_inputs(self.convolve_in_pytorch, x, self.weight, self.bias, cache, cu_seqlens, residual, mask)
        if not output_final_state:
            return y, None
        # a CUDA graph needs the state at the same address
        in_place = cache is not None and x.shape[1] == 1 and cu_seqlens is None and not cache.requires_grad
        in_place = in_place and not (torch.is_grad_enabled() or is_transformed())
        return y, cast(Any, cache).copy_(state) if in_place else state

    def forward_padded(
        self, x: torch.Tensor, residual: torch.Tensor | None, cache: torch.Tensor | None, output_final_state: bool,
        lengths: torch.Tensor, order: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the new state of rows `[B, T, D]`, the latter if it is asked for."""
        if order is not None:
            x = torch.zeros_like(x).scatter(1, order[..., None].expand_as(x), x)
        y = self.forward(x, cache=cache)[0]
        if order is not None:
            y = y.gather(1, order[..., None].expand_as(y))
        if residual is not None:
            y = y + residual.to(y.dtype)
        if not output_final_state:
            return y, None
        B, _, D = x.shape
        W = self.kernel_size[0]
        last = lengths[:, None] + torch.arange(W, dtype=torch.int64, device=x.device)
        state = _with_history(x, W, cache).gather(1, last[..., None].expand(B, W, D))
        return y, state.mT.contiguous()

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of :meth:`forward` with these weights, of `x` without states."""
        if not self.is_launched(x, cu_seqlens):
            return self.convolve_in_pytorch(x, weight, bias, None, cu_seqlens)[0]
        return modules.convolution.causal_conv1d(
            x,
            weight=weight.squeeze(1),
            bias=bias,
            activation=self.activation,
            backend=self.backend,
            cu_seqlens=cu_seqlens,
            chunk_indices=chunk_indices,
        )[0]

    def convolve_in_pytorch(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None, residual: torch.Tensor | None = None, mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the new state."""
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError('mask and cu_seqlens cannot be provided at the same time')
            x = x * mask.unsqueeze(-1)
        rows = widen(x.flatten(2))
        weight = weight.squeeze(1).to(rows.dtype)
        if cu_seqlens is None:
            y, state = _convolve_rows(rows, weight, state)
        else:
            y, state = _convolve_packed(rows, weight, state, cu_seqlens)
        if bias is not None:
            y = y + bias.to(rows.dtype)
        if self.activation is not None:
            y = F.silu(y)
        if residual is not None:
            y = y + residual.flatten(2)
        return y.to(x.dtype).view(x.shape), state.to(x.dtype).contiguous()


FORWARDS[ShortConvolution] = ShortConvolution.forward
