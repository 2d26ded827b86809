"""Longhorn as a sequence mixer of zoology (arXiv 2312.04927)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fla_longhorn.layers import Longhorn


class LonghornMixer(nn.Module):
    """:class:`Longhorn` with zoology's interface: `d_model` is the width, `options` the other arguments of the layer.

    Examples::
        >>> ModuleConfig(name='fla_longhorn_extras.zoology.LonghornMixer', kwargs={'state_size': 16})
    """

    def __init__(self, d_model: int, layer_idx: int | None = None, **options: Any) -> None:
        super().__init__()
        self.mixer = Longhorn(hidden_size=d_model, layer_idx=layer_idx, **options)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, T, d_model]` to the same shape."""
        return self.mixer(hidden_states)[0]

    def state_size(self, sequence_length: int = 2048) -> int:
        """Numbers in a sequence's state; as for Mamba, zoology does not count the convolution's inputs."""
        return self.mixer.intermediate_size * self.mixer.state_size
