"""What a layer tells a cache that records, so that its states can be cut back (:mod:`fla_longhorn.modules.rewind`)."""

from __future__ import annotations

from functools import partial
from typing import Any


class Replay(partial[dict[str, Any]]):
    """A function of n that returns a layer's states after the first n tokens of a piece.

    Copies of a cache share it, because it holds the layer.
    """

    def __deepcopy__(self, memo: dict) -> Replay:
        return self


def is_recording(layer: Any, cache: Any) -> bool:
    """Whether `crop` may need the states of `layer` in `cache`, which must not be overwritten then."""
    records = getattr(cache, 'records', None)
    return records is not None and records(layer.layer_idx)
