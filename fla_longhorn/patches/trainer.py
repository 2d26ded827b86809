"""transformers' Trainer, which selects the parameters to decay by name."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn

from fla_longhorn.layers.gate import NoWeightDecay


def wrap_get_parameter_names(get_parameter_names: Callable) -> Callable:
    """Wrap transformers' recursion over submodules, which returns the names of the parameters to decay."""
    def run(model: nn.Module, *args, **kwargs) -> list[str]:
        names = get_parameter_names(model, *args, **kwargs)
        return [name for name in names if name not in model.no_weight_decay] if isinstance(model, NoWeightDecay) else names

    return run
