"""How the rows of a call hold their tokens: one sequence a row, padded, or several packed ones.

A model makes one of these for all of its layers, so that a mask on a device is read once per call. A call of one token reads
nothing: a decoding step never waits for the device, and a CUDA graph can hold it.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers.utils import index_first_axis, pad_input

# tokens of one program of fla's convolution, which it calls chunk_size
CONVOLUTION_CHUNK = 64


class Rows:
    """Rows of tokens without padding; what comes before them in a cache may have some.

    Args:
        mask (torch.Tensor, Optional): The attention mask where it was read, bool `[B, tokens in the cache + T]` on the CPU.
    """

    # what is beside the tokens; the rest is on the CPU
    on_device: tuple[str, ...] = ()
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    # whether `first` serves
    can_replay = True

    def __init__(self, mask: torch.Tensor | None = None):
        self.mask = mask
        self._copies: dict[torch.device, Rows] = {}

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        """The same for a layer on another device, as accelerate spreads models."""
        if device not in self._copies:
            again = copy(self)
            for name in self.on_device:
                setattr(again, name, None if getattr(self, name) is None else getattr(self, name).to(device))
            self._copies[device] = again
        return self._copies[device]

    def count(self, B: int) -> int:
        """Sequences of B rows."""
        return B

    @property
    def of_convolution(self) -> dict[str, Any]:
        """Keywords of :class:`fla_longhorn.modules.ShortConvolution`."""
        return {}

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of `x` `[B, T, D]` as the layer mixes them."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` again, with zeros for the padding."""
        return x

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        """Keys `[B, T, D]`, zero where they must leave the state as it is."""
        return k

    def first(self, n: int, x: torch.Tensor) -> tuple[torch.Tensor, Rows | None]:
        """Of the convolution's inputs `x`, those of the first n columns, with their rows."""
        return x[:, :n], None


class Packed(Rows):
    """Sequences packed into one row.

    Args:
        cu_seqlens (torch.Tensor): Their boundaries `[N + 1]`.
        cu_seqlens_cpu (torch.Tensor, Optional): A copy on the CPU; a trace or a capture has none.
    """

    on_device: tuple[str, ...] = ('cu_seqlens', 'chunk_indices')
    cu_seqlens: torch.Tensor
    can_replay = False

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
    """`[chunks, 2]`, the sequence and the place in it of each chunk of a convolution on a GPU, without a wait for it.

    fla's own keeps what it computed for a tensor, also where the tensor has changed in place since.
    """
    if cu_seqlens_cpu is None or cu_seqlens.device.type == 'cpu':
        return None
    counts = cu_seqlens_cpu.diff().add(CONVOLUTION_CHUNK - 1).div(CONVOLUTION_CHUNK, rounding_mode='floor')
    sequences = torch.arange(len(counts), dtype=counts.dtype, device='cpu').repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[sequences]
    indices = torch.stack([sequences, torch.arange(len(sequences), dtype=counts.dtype, device='cpu') - first], 1)
    return indices.to(cu_seqlens, non_blocking=True)


class Unpadded(Packed):
    """Padded rows whose mask was read: their tokens are packed.

    Args:
        mask (torch.Tensor): bool `[B, tokens in the cache + T]` on the CPU.
        T (int): Tokens of a row in this call.
        device (torch.device): Where the tokens are.
    """

    on_device: tuple[str, ...] = ('cu_seqlens', 'chunk_indices', 'indices')
    can_replay = True

    def __init__(self, mask: torch.Tensor, T: int, device: torch.device):
        self.kept = mask[:, -T:]
        cu_seqlens = F.pad(self.kept.sum(1).cumsum(0), (1, 0)).int()
        super().__init__(cu_seqlens.to(device, non_blocking=True), cu_seqlens, mask)
        self.indices = self.kept.flatten().nonzero().flatten().to(device, non_blocking=True)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return index_first_axis(x.flatten(0, 1), self.indices)[None]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return pad_input(x.squeeze(0), self.indices, *self.kept.shape)

    def first(self, n: int, x: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        kept = self.kept[:, :n]
        if not kept.any():
            return x.new_zeros(*kept.shape, x.shape[-1]), Padded(kept.to(x.device, non_blocking=True))
        cu_seqlens = F.pad(kept.sum(1).cumsum(0), (1, 0)).int()
        tokens = (self.kept.nonzero()[:, 1] < n).nonzero().flatten().to(x.device, non_blocking=True)
        return x[:, tokens], Packed(cu_seqlens.to(x.device, non_blocking=True), cu_seqlens)


class Padded(Rows):
    """Padded rows whose mask can't be read, or has no tokens: each row is moved to the left, its padding behind it.

    Causal mixing of the moved rows gives the tokens what they get without padding. The padding behind them gets keys of zero,
    which leave the state as it is.

    Args:
        mask (torch.Tensor): 0-1 mask `[B, T]`, 0 for padding, which may be anywhere.
        read (torch.Tensor, Optional): The whole mask, as :class:`Rows` takes it.
    """

    on_device: tuple[str, ...] = ('kept', 'lengths', 'order', 'moved', 'zero')
    can_replay = False

    def __init__(self, mask: torch.Tensor, read: torch.Tensor | None = None):
        super().__init__(read)
        kept = mask != 0
        self.kept = kept[..., None]
        self.lengths = kept.sum(1)
        # one tensor for all layers, of no dimension, which keeps the dtype of what it fills
        self.zero = torch.zeros((), dtype=torch.float32, device=mask.device)
        self.order: torch.Tensor | None = None
        self.moved = self.kept
        if mask.shape[1] == 1:
            return
        order = torch.where(kept, kept.cumsum(1) - 1, self.lengths[:, None] + (~kept).cumsum(1) - 1)
        self.order = order[..., None]
        self.moved = (torch.arange(mask.shape[1], dtype=torch.int64, device=mask.device) < self.lengths[:, None])[..., None]

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
