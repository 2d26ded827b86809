"""The states of a read prompt in a file: safetensors, signed whole, with the weights that read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.models.longhorn.configuration_longhorn import MIXER_OPTIONS
from fla_longhorn.modules.cache import RewindableCache


def sign(tensors: Mapping[str, torch.Tensor], *about: Any) -> str:
    """A hash of names, dtypes, shapes, values and what else is given."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f'{name} {x.dtype} {list(x.shape)}'.encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sign_model(model: LonghornForCausalLM) -> str:
    """Of the weights, in their dtype, and the options on which the states depend."""
    names = {*MIXER_OPTIONS, 'attn', 'hidden_act'} - {'recompute'}
    return sign(model.base_model.state_dict(), {name: getattr(model.config, name) for name in names})


def save(cache: RewindableCache, path: Path, model: LonghornForCausalLM) -> None:
    """Write a cache of the model."""
    states, weights = cache.state_dict(), sign_model(model)
    save_file(states, path, metadata={'weights': weights, 'all': sign(states, weights)})


def load(path: Path, model: LonghornForCausalLM) -> RewindableCache:
    """A cache that goes on, bit for bit.

    Raises:
        ValueError: the file is not as it was written, or other weights read the prompt.
    """
    with safe_open(path, 'pt') as file:
        about, states = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if about.get('all') != sign(states, about.get('weights')):
        raise ValueError(f'path must be of a file as save wrote it, got {path}')
    if about['weights'] != sign_model(model):
        raise ValueError(f"path must be of a file of this model's weights, dtype and options, got {path} of others")
    cache = RewindableCache()
    cache.load_state_dict({name: x.to(model.device) for name, x in states.items()})
    return cache
