"""Parameters of a layer that weight decay leaves alone: `D`, as in the authors' code, which decays matrices only.

A layer lists them in `no_weight_decay`, and each has the attribute `_no_weight_decay`, which training code of the Mamba family
asks for. transformers' Trainer asks for neither, so `fla_longhorn.registry` wraps the function by which it chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn


def mark_no_weight_decay(layer: Any) -> None:
    for name in layer.no_weight_decay:
        parameter = layer._parameters.get(name)
        if parameter is not None:
            parameter._no_weight_decay = True


def wrap_get_parameter_names(get_parameter_names: Callable) -> Callable:
    """transformers' recursion over submodules, which ends in each layer with the names of the parameters to decay."""
    from fla_longhorn.layers.longhorn import Longhorn

    def run(model: nn.Module, *args, **kwargs) -> list[str]:
        names = get_parameter_names(model, *args, **kwargs)
        return [name for name in names if name not in model.no_weight_decay] if isinstance(model, Longhorn) else names

    return run
