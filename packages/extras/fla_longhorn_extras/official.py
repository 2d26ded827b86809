"""Conversion of the authors' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

# the authors' names -> ours; `\g<i>` is the layer
RENAMES = (
    (r'backbone\.embedding\.weight', r'model.embeddings.weight'),
    (r'backbone\.layers\.(?P<i>\d+)\.mixer\.dt_head\.(?P<p>weight|bias)', r'model.layers.\g<i>.attn.beta_proj.\g<p>'),
    (
        r'backbone\.layers\.(?P<i>\d+)\.mixer\.(?P<p>D|(?:in_proj|out_proj|conv1d)\.(?:weight|bias)|x_proj\.weight)',
        r'model.layers.\g<i>.attn.\g<p>',
    ),
    (r'backbone\.layers\.(?P<i>\d+)\.norm\.weight', r'model.layers.\g<i>.attn_norm.weight'),
    (r'backbone\.norm_f\.weight', r'model.norm.weight'),
    (r'lm_head\.weight', r'lm_head.weight'),
)
# prefixes of `torch.compile`, DDP and the authors' `LonghornLM`
WRAPPERS = r'^(?:(?:_orig_mod|module|transformer)\.)*'


def convert_official_state_dict(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a state dict of the authors' code (github.com/Cranial-XIX/longhorn) for Longhorn's own language model.

    Args:
        state_dict (Mapping[str, torch.Tensor]):
            Their tensors, with or without the prefix `transformer.` (and DDP's or `torch.compile`'s). Not copied.

    Returns:
        dict[str, torch.Tensor]:
            The same tensors by our names, for `load_state_dict(..., strict=True)`.

    Raises:
        ValueError: a name is not one of the authors', or two names map to the same.
    """
    converted = {}
    for name, tensor in state_dict.items():
        matches = ((re.fullmatch(theirs, re.sub(WRAPPERS, '', name)), ours) for theirs, ours in RENAMES)
        ours = next((match.expand(ours) for match, ours in matches if match), None)
        if ours is None:
            raise ValueError(f"state_dict holds {name!r}, which is no parameter of the authors' Longhorn")
        if ours in converted:
            raise ValueError(f'state_dict holds {ours!r} twice, the second time as {name!r}')
        converted[ours] = tensor
    return converted
