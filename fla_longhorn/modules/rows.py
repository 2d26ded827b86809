"""How the rows of a call hold their tokens: one sequence per row, padded rows, or packed sequences.

A model makes one of these for all its layers, so that a mask on a device is read once per call. A call of one token reads
nothing on the host, so decoding does not synchronise and can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
from fla.layers.utils import get_unpad_data, index_first_axis, pad_input

# tokens per program of fla's convolution (its chunk_size)
CONVOLUTION_CHUNK = 64


class Rows:
    """Rows of tokens without padding; the tokens before them in a cache may have some.

    `mask` is the attention mask if it was read: bool `[B, tokens in the cache + T]` on the CPU.
    """

    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    # keywords for :class:`fla_longhorn.modules.convolution.ShortConvolution`
    of_convolution: dict[str, Any] = {}

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        self.mask = mask

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        """For a layer on another device, where accelerate splits a model."""
        return self

    def count(self, B: int) -> int:
        """Number of sequences in B rows."""
        return B

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """From `x` `[B, T, D]` to the layout in which the layer mixes tokens."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Back to `[B, T, D]`, with zeros for the padding."""
        return x

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        """Set keys or gates `[B, T, ...]` of padding to zero, which leaves the state unchanged."""
        return k


# stands for a call that has neither padding nor packed sequences
WHOLE = Rows()


class Packed(Rows):
    """Sequences packed into one row, with boundaries `[N + 1]`; those on the CPU are `None` where they cannot be read."""

    cu_seqlens: torch.Tensor

    def __init__(self, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> None:
        super().__init__()
        self.cu_seqlens, self.cu_seqlens_cpu = cu_seqlens, cu_seqlens_cpu
        indices = chunk_indices(cu_seqlens, cu_seqlens_cpu)
        self.of_convolution = {'cu_seqlens': cu_seqlens, 'chunk_indices': indices}

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        return self if device == self.cu_seqlens.device else Packed(self.cu_seqlens.to(device), self.cu_seqlens_cpu)

    def count(self, B: int) -> int:
        return self.cu_seqlens.shape[0] - 1


def chunk_indices(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> torch.Tensor | None:
    """`[chunks, 2]`: for each chunk of fla's convolution on a GPU, its sequence and its index in it.

    fla's own function reads `cu_seqlens` on the host, and caches by tensor even if the tensor was changed in place.
    """
    if cu_seqlens_cpu is None or cu_seqlens.device.type == 'cpu':
        return None
    counts = cu_seqlens_cpu.diff().add(CONVOLUTION_CHUNK - 1).div(CONVOLUTION_CHUNK, rounding_mode='floor')
    sequences = torch.arange(len(counts), dtype=counts.dtype, device='cpu').repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[sequences]
    indices = torch.stack([sequences, torch.arange(len(sequences), dtype=counts.dtype, device='cpu') - first], 1)
    return indices.to(cu_seqlens, non_blocking=True)


class Unpadded(Packed):
    """Padded rows, of T tokens on `device`, whose mask was read; the layer mixes their tokens packed."""

    def __init__(self, mask: torch.Tensor, T: int, device: torch.device) -> None:
        self.kept = mask[:, -T:]
        indices, cu_seqlens, _ = get_unpad_data(self.kept)
        super().__init__(cu_seqlens.to(device, non_blocking=True), cu_seqlens)
        self.mask, self.indices = mask, indices.to(device, non_blocking=True)

    @cached_property
    def in_place(self) -> Padded:
        """The same for a layer whose parts must see rows."""
        return Padded(self.kept.to(self.indices.device, non_blocking=True), self.mask)

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        return self if device == self.indices.device else Unpadded(cast(torch.Tensor, self.mask), self.kept.shape[1], device)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return index_first_axis(x.flatten(0, 1), self.indices)[None]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return pad_input(x.squeeze(0), self.indices, *self.kept.shape)


class Padded(Rows):
    """Padded rows, by a 0-1 mask `[B, T]`: one that cannot be read or has no tokens, or of a layer whose parts must see rows.

    Tokens and padding stay where they are; only the convolution moves the tokens of a row together. The keys of padding are
    zero, which leaves the state unchanged. `read` is the mask of :class:`Rows`.
    """

    def __init__(self, mask: torch.Tensor, read: torch.Tensor | None = None) -> None:
        super().__init__(read)
        self.padding = mask == 0
        kept = ~self.padding
        lengths = kept.sum(1)
        # padding goes behind the tokens, which do not depend on it there
        order = torch.where(kept, kept.cumsum(1) - 1, lengths[:, None] + self.padding.cumsum(1) - 1)
        self.of_convolution = {'lengths': lengths, 'order': None if mask.shape[1] == 1 else order}

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        return self if device == self.padding.device else Padded(~self.padding.to(device), self.mask)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self.padding[..., None], 0)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self.padding[..., None], 0)

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        return k.masked_fill(self.padding.view(*self.padding.shape, *[1] * (k.dim() - 2)), 0)
