"""PyTorch's attention in fla's own modules that did not find the package `flash_attn`, for experiments with native models."""

from __future__ import annotations

import importlib
from typing import Any

from fla_longhorn.modules.flash_attention import flash_attn_func, flash_attn_varlen_func

# the modules of fla that import the two functions and need nothing else of the package
MODULES = (
    'fla.layers.attn', 'fla.layers.bitattn', 'fla.layers.mla', 'fla.layers.rodimus', 'fla.ops.deltaformer.parallel',
    'fla.ops.nsa.naive', 'fla.ops.nsa.parallel',
)


def use_pytorch_attention() -> None:
    """An installed `flash_attn` stays. Longhorn's models and swapped families do not need this."""
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if getattr(module, 'flash_attn_func', None) is None:
            module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
