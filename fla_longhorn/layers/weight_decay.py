"""Parameters without weight decay: `D`, as in the authors' code, which decays matrices only, and those of a gate.

A layer marks each with `_no_weight_decay`, which training code for Mamba reads and FSDP2 loses; a model returns their names
from `no_weight_decay()`, as timm's models do.
"""

from __future__ import annotations

from typing import Any, Self

import torch.nn as nn


class NoWeightDecay(nn.Module):
    """A layer with parameters without weight decay."""

    no_weight_decay: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.mark_no_weight_decay()

    def _apply(self, *args, **kwargs) -> Self:
        # `to_empty` makes new parameters
        super()._apply(*args, **kwargs)
        self.mark_no_weight_decay()
        return self

    def __setstate__(self, state: dict) -> None:
        # deepcopy of a parameter drops its attributes
        super().__setstate__(state)
        self.mark_no_weight_decay()

    def mark_no_weight_decay(self) -> None:
        own: dict[str, Any] = dict(self.named_parameters(recurse=False))
        for name in own.keys() & set(self.no_weight_decay):
            own[name]._no_weight_decay = True


def no_weight_decay(model: nn.Module) -> set[str]:
    """Names of the parameters of `model` without weight decay, also after FSDP2 has replaced them."""
    layers = ((name, x) for name, x in model.named_modules() if isinstance(x, NoWeightDecay))
    return {f'{name}.{parameter}'.lstrip('.') for name, x in layers for parameter in x.no_weight_decay}
