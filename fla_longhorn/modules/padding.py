"""Padding masks: what one may be, and its use in a trace, where rows move to the left instead of losing their padding."""

from __future__ import annotations

import torch

from fla_longhorn.ops.last_read import LastRead
from fla_longhorn.ops.plain import is_plain

_last_read = LastRead()


def check_attention_mask(mask: torch.Tensor | None, B: int, T: int, length: int | None = None) -> None:
    """Refuse what is no mask of zeros and ones of shape `[B, >= T]`, or `[B, length]` where that is given.

    The values of a traced mask can't be read; there all but 0 counts as 1.
    """
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f'attention_mask must be a torch.Tensor or None, got {type(mask).__name__}')
    if mask.dim() != 2:
        raise ValueError(
            'attention_mask must be a 0-1 padding mask of shape [batch_size, sequence_length], '
            f'got shape {list(mask.shape)}'
        )
    if mask.shape[0] != B or mask.shape[1] < T or (length is not None and mask.shape[1] != length):
        wanted = f'[{B}, {length}], the tokens in the cache included' if length is not None else f'[B, >= T] = [{B}, >= {T}]'
        raise ValueError(f'attention_mask must have shape {wanted}, got {list(mask.shape)}')
    if mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    remembered = mask.device.type != 'cpu' and not mask.is_inference()
    if remembered and _last_read.is_still(mask):
        return
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f'attention_mask must hold 0 for padding and 1 for tokens, got {wrong[0].item()}')
    if remembered:
        _last_read.note(mask)


def ends_in_tokens(mask: torch.Tensor) -> bool:
    """Whether the last token of every row of a checked mask `[B, T]` is no padding."""
    return bool(mask[:, -1].all())


def mask_of_mixers(mask: torch.Tensor | None, T: int) -> torch.Tensor | None:
    """What mixers without attention need of a checked mask: for a plain token that no row pads, nothing."""
    return None if T == 1 and mask is not None and is_plain(mask) and ends_in_tokens(mask) else mask


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
