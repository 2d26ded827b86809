"""Caches in files: safetensors with the states, and what tells whether they belong to a model.

The metadata hold hashes of the config, of the states and, on request, of the weights. Reading checks them all before it makes
a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = 'fla-longhorn states, 1'
# fields of a config that do not change how states are computed from tokens, or that the weights' hash covers
OTHER = {'_name_or_path', 'architectures', 'dtype', 'transformers_version', 'use_cache', 'recompute'}


def hash_of_config(model: PreTrainedModel) -> str:
    known = {name: x for name, x in model.config.to_dict().items() if name not in OTHER}
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def hash_of_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, x in sorted(tensors):
        digest.update(f'{name} {x.dtype} {list(x.shape)}'.encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def name_tensors(tree: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`tree` with the tensors' names in their place; the tensors go to `tensors`."""
    if isinstance(tree, torch.Tensor):
        # each tensor gets its own memory: views of one memory cannot be stored
        tensors[prefix] = tree.detach().clone(memory_format=torch.contiguous_format)
        return prefix
    if isinstance(tree, dict):
        return {name: name_tensors(x, f'{prefix}.{name}', tensors) for name, x in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [name_tensors(x, f'{prefix}.{i}', tensors) for i, x in enumerate(tree)]
    if tree is None:
        return None
    raise TypeError(f'a cache in a file must hold tensors, got {type(tree).__name__} in {prefix}')


def place_tensors(tree: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What :func:`name_tensors` was given."""
    if isinstance(tree, str):
        return tensors[tree]
    if isinstance(tree, dict):
        return {name: place_tensors(x, tensors) for name, x in tree.items()}
    return None if tree is None else tuple(place_tensors(x, tensors) for x in tree)


def save(layers: list[Any], path: str | os.PathLike, model: PreTrainedModel, weights: bool) -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = [
        {'tokens': layer.get_seq_length(), 'state': name_tensors(layer.state, str(i), tensors)}
        for i, layer in enumerate(layers)
    ]
    about = {
        'format': FORMAT,
        'config': hash_of_config(model),
        'states': hash_of_tensors(tensors.items()),
        'layers': json.dumps(tree),
    }
    if weights:
        about['weights'] = hash_of_tensors(model.base_model.state_dict().items())
    # a reader finds the whole file or none: it gets its name when it is complete
    part = Path(f'{os.fspath(path)}.part')
    try:
        save_file(tensors, part, metadata=about)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike, model: PreTrainedModel) -> list[tuple[int, Any]]:
    """Of each layer, the number of tokens and its state on the model's device.

    Raises:
        ValueError: the file is truncated, edited or of another model.
    """
    try:
        with safe_open(path, 'pt') as file:
            about = file.metadata() or {}
            if about.get('format') != FORMAT:
                raise ValueError(f'path must be of a file that RewindableCache.save wrote ({FORMAT}), got {path}')
            if about['config'] != hash_of_config(model):
                raise ValueError(f"path must be of a file that a model with this model's config wrote, got {path}")
            if 'weights' in about and about['weights'] != hash_of_tensors(model.base_model.state_dict().items()):
                raise ValueError(f"path must be of a file that a model with this model's weights wrote, got {path}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safetensors' file is no mapping
    except SafetensorError as error:
        raise ValueError(f'path must be of a whole safetensors file, got {path}: {error}') from error
    if about['states'] != hash_of_tensors(tensors.items()):
        raise ValueError(f'path must be of a file as it was written, got {path}, whose states were changed')
    tensors = {name: x.to(model.device) for name, x in tensors.items()}
    return [(layer['tokens'], place_tensors(layer['state'], tensors)) for layer in json.loads(about['layers'])]
