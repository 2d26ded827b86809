"""Rotary position embedding on the CPU.

Registered: `rotary_embedding_fwdbwd`, behind fla's `rotary_embedding` and `RotaryEmbedding`.
"""

from __future__ import annotations

import torch
from fla.modules.rotary import ops

from fla_cpu.backend import implements, widen


def _positions(x: torch.Tensor, offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The position in its sequence, plus the offset, of every token: `[B, T]`, or `[1, T]` if all rows agree."""
    tokens = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
    if cu_seqlens is None:
        return tokens + offsets[:, None] if isinstance(offsets, torch.Tensor) else (tokens + offsets)[None]
    return (tokens - (cu_seqlens[:-1] - offsets).repeat_interleave(cu_seqlens.diff()))[None]


def _halves(x: torch.Tensor, width: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second channel `[B, T, H, width]` of every rotated pair."""
    if interleaved:
        return x[..., 0:2 * width:2], x[..., 1:2 * width:2]
    return x[..., :width], x[..., width:2 * width]


@implements(ops.rotary_embedding_fwdbwd)
def rotary_embedding_fwdbwd(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    chunk_indices: torch.LongTensor | None = None,
) -> torch.Tensor:
    """Rotate the first 2R channels of `x` `[B, T, H, D]` by the angles in `cos`, `sin` `[TR, R]`, back if `conjugate`.

    A token at a negative position (left padding) becomes zero in those channels, or stays as it is with `inplace`.
    """
    length, width = cos.shape
    if cos.shape != sin.shape or 2 * width > x.shape[-1]:
        raise ValueError(
            f'cos and sin must have one shape [positions, at most {x.shape[-1] // 2}], '
            f'got {tuple(cos.shape)} and {tuple(sin.shape)}'
        )
    position = _positions(x, seqlen_offsets, cu_seqlens)
    if position.numel() and position.max() >= length:
        raise ValueError(f'cos and sin hold {length} positions, but position {position.max().item()} is used')
    known = position >= 0
    b_cos, b_sin = (widen(table)[position.clamp_min(0)][:, :, None] for table in (cos, sin))
    if conjugate:
        b_sin = -b_sin

    first, second = (widen(half) for half in _halves(x, width, interleaved))
    rotated = first * b_cos - second * b_sin, first * b_sin + second * b_cos
    # with gradients recorded (create_graph=True), the gradient of the output is another's too
    inplace = inplace and not (conjugate and torch.is_grad_enabled())
    y = x if inplace else torch.empty_like(x)
    if not inplace:
        y[..., 2 * width:] = x[..., 2 * width:]
    for out, value in zip(_halves(y, width, interleaved), rotated, strict=True):
        if not known.all():
            value = torch.where(known[:, :, None, None], value, out if inplace else 0.0)
        out.copy_(value)
    return y
