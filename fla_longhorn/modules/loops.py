"""The compute dtype, and compiled loops that run a module's forward on the CPU, if some are registered."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

# dtypes of the tensors that loops read
LOOP_DTYPES = (torch.float32, torch.bfloat16)
_find: Callable[..., ModuleType | None] | None = None


def register_loops(find: Callable[..., ModuleType | None]) -> None:
    """Let `find(*tensors)` return a module with loops for these tensors, or None."""
    global _find
    _find = find


def load_loops(*tensors: torch.Tensor | None) -> ModuleType | None:
    """The loops that can read `tensors` of a plain call (:func:`fla_longhorn.ops.plain.is_plain`), if there are any."""
    return None if _find is None else _find(*tensors)


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the compute dtype: float32, as in fla's kernels; float64 stays float64 for gradient checks."""
    return x if x.dtype == torch.float64 else x.float()
