"""Values of a tensor on a device, kept: boundaries are read once for all layers of a model."""

from __future__ import annotations

import weakref

import torch


class LastRead:
    """The values of one tensor, as long as it lives and is not changed, for reading waits for the device.

    Layers share tensors. Compares tensors by identity: weak references to live tensors would compare them elementwise.
    """

    def __init__(self) -> None:
        self._tensor: weakref.ref | None = None
        self._version = -1
        self._values: list = []

    def values(self, x: torch.Tensor) -> list:
        """`x.tolist()`, which must not be changed."""
        # memory of the CPU can change without a new version, as NumPy's arrays do; inference tensors have none
        if x.device.type == 'cpu' or x.is_inference():
            return x.tolist()
        if self._tensor is None or self._tensor() is not x or self._version != x._version:
            self._tensor, self._version, self._values = weakref.ref(x), x._version, x.tolist()
        return self._values


last_read = LastRead()
