"""Images of any size packed into one row of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """Where the N images are in a row of T tokens.

    Attributes:
        lengths: tokens per image, `[N]`, int64.
        cu_seqlens: boundaries of the images, `[N + 1]`, int32; `cu_seqlens_cpu` is a copy on the CPU.
        reverse: indices `[T]`, int64, that reverse the tokens of each image.
    """

    lengths: torch.Tensor
    cu_seqlens: torch.Tensor
    reverse: torch.Tensor
    cu_seqlens_cpu: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        counts = torch.tensor(lengths, dtype=torch.int64, device='cpu')
        ends = counts.cumsum(0)
        bounds = torch.cat([ends.new_zeros(1), ends]).int()
        first_and_last = (2 * ends - counts - 1).repeat_interleave(counts)
        order = first_and_last - torch.arange(int(ends[-1]), dtype=torch.int64, device='cpu')
        there = [x.to(device, non_blocking=True) for x in (counts, bounds, order)]
        return cls(there[0], there[1], there[2], bounds)


def reverse(x: torch.Tensor, packing: Packing | None) -> torch.Tensor:
    """Reverse the tokens of each image; `x` is `[B, T, ...]`."""
    return x.flip(1) if packing is None else x.index_select(1, packing.reverse)
