"""A padding mask without shapes that depend on it: rows moved to the left and back, in place of taking the padding out."""

from __future__ import annotations

import torch


class Padding:
    """Where the tokens of padded rows go when each row is moved to the left, its padding behind it.

    Causal mixing of the moved rows gives the tokens what they get without padding. What is left to the caller is that the
    padding behind them leaves the states as they are.

    Args:
        mask (torch.Tensor): 0-1 mask `[B, T]`, 0 for padding, which may be anywhere.
    """

    def __init__(self, mask: torch.Tensor):
        kept = mask != 0
        self.kept = kept[..., None]
        self.lengths = kept.sum(1)
        order = torch.where(kept, kept.cumsum(1) - 1, self.lengths[:, None] + (~kept).cumsum(1) - 1)
        self.order = order[..., None]
        self.moved = (torch.arange(mask.shape[1], device=mask.device) < self.lengths[:, None])[..., None]

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[B, T, D]` with each row's tokens first, in their order, and zeros behind them."""
        return torch.zeros_like(x).scatter(1, self.order.expand_as(x), torch.where(self.kept, x, 0))

    def silence(self, x: torch.Tensor) -> torch.Tensor:
        """Moved rows `[B, T, D]` with the padding set to zero."""
        return torch.where(self.moved, x, 0)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """Moved rows `[B, T, D]` back in their places, with zeros for the padding."""
        return torch.where(self.kept, x.gather(1, self.order.expand_as(x)), 0)
