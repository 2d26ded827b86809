"""fla's operators as a GPU that is not there would get them."""

from __future__ import annotations

import importlib
from collections.abc import Callable


class OfOneDevice(list):
    """What fla keeps for each device by its number, which tensors without data have none of."""

    def __getitem__(self, index):
        return super().__getitem__(0 if index is None else index)


def operator(module: str, name: str) -> Callable:
    """One of `fla.ops`, which takes the tiles that fit the shared memory of the device that is announced."""
    hardware = importlib.import_module('fla.utils.hardware')
    known = hardware.get_all_max_shared_mem()
    hardware.get_all_max_shared_mem = lambda: OfOneDevice(known)
    return getattr(importlib.import_module(f'fla.ops.{module}'), name)
