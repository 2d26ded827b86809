"""Longhorn as a sequence mixer of zoology (arXiv 2312.04927), named in its configs by a string."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fla_longhorn.layers.longhorn import Longhorn


class LonghornMixer(nn.Module):
    """:class:`Longhorn` as zoology builds, calls and weighs its mixers.

    Args:
        d_model (int):
            Width of the input and output.
        layer_idx (int, Optional):
            Index of the block. Default: `None`.
        options (Optional):
            The other arguments of :class:`Longhorn`.

    Examples::
        >>> ModuleConfig(name='fla_longhorn.contrib.zoology.LonghornMixer', kwargs={'state_size': 16})
    """

    def __init__(self, d_model: int, layer_idx: int | None = None, **options: Any) -> None:
        super().__init__()
        self.mixer = Longhorn(hidden_size=d_model, layer_idx=layer_idx, **options)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, T, d_model]` to the same shape."""
        return self.mixer(hidden_states)[0]

    def state_size(self, sequence_length: int = 2048) -> int:
        """Numbers in the state of one sequence, of any length; without the convolution's inputs, as zoology counts Mamba's."""
        return self.mixer.intermediate_size * self.mixer.state_size
