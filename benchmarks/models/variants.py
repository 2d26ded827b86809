"""Ways to decode with a model: unchanged, with int8 weights or weights by columns, with a compiled step of one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn as nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Variant:
    """A change to a model; `suffix` follows its name in a report."""

    suffix: str = ''
    int8: bool = False
    columns: bool = False
    compiled: bool = False


def variants(compiled: bool, int8: bool, columns: bool) -> list[Variant]:
    """The variants of the options, the unchanged model first."""
    chosen = [Variant()]
    if columns:
        chosen.append(Variant(', by columns', columns=True))
    if int8:
        chosen.append(Variant(', int8', int8=True))
    if compiled:
        chosen.append(Variant(', compiled', compiled=True))
    if int8 and compiled:
        chosen.append(Variant(', int8 compiled', int8=True, compiled=True))
    return chosen


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose `nn.Linear` layers hold int8 weights, by torchao. GPT-2's blocks have none: only its head changes.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = deepcopy(model)
    quantize_(model, Int8WeightOnlyConfig())
    return model


def by_columns(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose `nn.Linear` layers hold their weights by columns, as GPT-2's layers always do.

    But for Longhorn's small projections, which its loop for a token takes by rows.
    """
    model = deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(('x_proj', 'beta_proj', 'gate.down', 'gate.up')):
            module.weight.data = module.weight.data.mT.contiguous().mT
    return model


def compiled_step(model: PreTrainedModel) -> Callable:
    """The model's call for one token, compiled at the first call; on a GPU into CUDA graphs."""
    return torch.compile(model.forward, mode='reduce-overhead' if model.device.type == 'cuda' else None)


@contextmanager
def compiling() -> Iterator[None]:
    """Drop what was compiled before, and fail if a step is recompiled too often: it would silently run uncompiled."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()
