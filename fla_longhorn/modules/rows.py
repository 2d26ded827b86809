"""How the rows of a call hold their tokens: one sequence per row, padded rows, or packed sequences.

A model makes one of these for all its layers, so that a mask on a device is read once per call. A call of one token reads
nothing on the host, so decoding does not synchronise and can be captured in a CUDA graph.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers.utils import index_first_axis, pad_input

# tokens per program of fla's convolution (its chunk_size)
CONVOLUTION_CHUNK = 64


class Rows:
    """Rows of tokens without padding; the tokens before them in a cache may have some.

    `mask` is the attention mask if it was read: bool `[B, tokens in the cache + T]` on the CPU.
    """

    # attributes on the device of the tokens; the others are on the CPU
    on_device: tuple[str, ...] = ()
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None

    def __init__(self, mask: torch.Tensor | None = None):
        self.mask = mask
        self._copies: dict[torch.device, Rows] = {}

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        """A copy for a layer on another device, where accelerate splits a model."""
        if device not in self._copies:
            again = copy(self)
            for name in self.on_device:
                setattr(again, name, None if getattr(self, name) is None else getattr(self, name).to(device))
            self._copies[device] = again
        return self._copies[device]

    def count(self, B: int) -> int:
        """Number of sequences in B rows."""
        return B

    @property
    def of_convolution(self) -> dict[str, Any]:
        """Keywords for :class:`fla_longhorn.modules.ShortConvolution`."""
        return {}

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """From `x` `[B, T, D]` to the layout in which the layer mixes tokens."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Back to `[B, T, D]`, with zeros for the padding."""
        return x

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        """Set keys `[B, T, D]` of padding to zero, which leaves the state unchanged."""
        return k


# stands for a call that has neither padding nor packed sequences
WHOLE = Rows()


class Packed(Rows):
    """Sequences packed into one row, with boundaries `[N + 1]`; those on the CPU are `None` in a trace or a capture."""

    on_device: tuple[str, ...] = ('cu_seqlens', 'chunk_indices')
    cu_seqlens: torch.Tensor

    def __init__(self, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, mask: torch.Tensor | None = None):
        super().__init__(mask)
        self.cu_seqlens, self.cu_seqlens_cpu = cu_seqlens, cu_seqlens_cpu
        self.chunk_indices = chunk_indices(cu_seqlens, cu_seqlens_cpu)

    def count(self, B: int) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def of_convolution(self) -> dict[str, Any]:
        return {'cu_seqlens': self.cu_seqlens, 'chunk_indices': self.chunk_indices}


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

    on_device: tuple[str, ...] = ('cu_seqlens', 'chunk_indices', 'indices')

    def __init__(self, mask: torch.Tensor, T: int, device: torch.device):
        self.kept = mask[:, -T:]
        cu_seqlens = F.pad(self.kept.sum(1).cumsum(0), (1, 0)).int()
        super().__init__(cu_seqlens.to(device, non_blocking=True), cu_seqlens, mask)
        self.indices = self.kept.flatten().nonzero().flatten().to(device, non_blocking=True)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return index_first_axis(x.flatten(0, 1), self.indices)[None]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return pad_input(x.squeeze(0), self.indices, *self.kept.shape)


class Padded(Rows):
    """Padded rows whose 0-1 mask `[B, T]` cannot be read, or has no tokens; the layer mixes them with the tokens moved left.

    Mixing is causal, so padding after the tokens does not change them. Its keys are zero, which leaves the state unchanged.
    `read` is the mask of :class:`Rows`.
    """

    on_device: tuple[str, ...] = ('kept', 'lengths', 'order', 'moved', 'zero')

    def __init__(self, mask: torch.Tensor, read: torch.Tensor | None = None):
        super().__init__(read)
        kept = mask != 0
        self.kept = kept[..., None]
        self.lengths = kept.sum(1)
        # a zero without dimensions does not change the dtype in `where`
        self.zero = torch.zeros((), dtype=torch.float32, device=mask.device)
        self.order: torch.Tensor | None = None
        self.moved = self.kept
        if mask.shape[1] > 1:
            order = torch.where(kept, kept.cumsum(1) - 1, self.lengths[:, None] + (~kept).cumsum(1) - 1)
            self.order = order[..., None]
            columns = torch.arange(mask.shape[1], dtype=torch.int64, device=mask.device)
            self.moved = (columns < self.lengths[:, None])[..., None]

    @property
    def of_convolution(self) -> dict[str, Any]:
        return {'lengths': self.lengths}

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(self.kept, x, self.zero)
        return x if self.order is None else torch.zeros_like(x).scatter(1, self.order.expand_as(x), x)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.kept, x if self.order is None else x.gather(1, self.order.expand_as(x)), self.zero)

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        return torch.where(self.moved, k, self.zero)
