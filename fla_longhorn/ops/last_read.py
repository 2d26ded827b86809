"""Which device tensor was read last: reading waits for the device, and the layers of a model share their tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class LastRead:
    """The tensor whose values were read last, with its version and what else the reading depended on.

    The tensor is compared by identity: two weak references to live tensors compare as the tensors do, elementwise.
    """

    def __init__(self) -> None:
        self._tensor: weakref.ref | None = None
        self._details: tuple = ()

    def is_still(self, x: torch.Tensor, *details: Any) -> bool:
        """Whether `x` was read last, unchanged since, with the same `details`."""
        return self._tensor is not None and self._tensor() is x and self._details == (x._version, *details)

    def note(self, x: torch.Tensor, *details: Any) -> None:
        self._tensor, self._details = weakref.ref(x), (x._version, *details)
